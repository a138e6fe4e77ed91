"""An engine over the reference models, for every algorithm that has a reference drafter."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal

import torch

from graphkit.attention import PagedAttention, SdpaAttention, TritonAttention
from graphkit.config import BufferSizes
from graphkit.engine import (
    Drafter,
    EagleDrafter,
    EngineModel,
    MultiLayerDrafter,
    NgramDrafter,
    SpeculativeEngine,
)
from graphkit.errors import ConfigError
from graphkit.graphs import Backend, resolve_device
from graphkit.kv import ReqToTokenPool
from graphkit.reference.checkpoint import (
    default_checkpoint,
    default_standalone_checkpoint,
    load_checkpoint,
)
from graphkit.reference.draft_checkpoint import (
    default_eagle_checkpoint,
    default_mtp_checkpoint,
    load_eagle_head,
    load_mtp_head,
)
from graphkit.reference.model import LlamaModel
from graphkit.reference.pools import PoolFactory
from graphkit.reference.runner_forwards import (
    EagleForward,
    MTPForward,
    StandaloneForward,
    VerifyForward,
)
from graphkit.reference.tokenizer import END_OF_TEXT
from graphkit.spec import SpecConfig

ALGORITHMS = ("NONE", "EAGLE", "MULTI_LAYER_EAGLE", "STANDALONE", "NGRAM")
"""Algorithms of ``reference_engine``. MULTI_LAYER_EAGLE is EAGLE with a chain of draft layers."""


def reference_engine(
    algorithm: str = "EAGLE",
    *,
    topk: int = 1,
    num_steps: int = 3,
    num_draft_tokens: int | None = None,
    max_batch_size: int = 8,
    max_context_len: int = 1024,
    page_size: int = 1,
    batch_sizes: Iterable[int] | None = None,
    device: torch.device | str = "auto",
    dtype: torch.dtype = torch.float32,
    backend: Backend | None = None,
    attention: type[PagedAttention] | None = None,
    generation: Literal["v1", "v2", "v3"] | None = None,
    steps_per_launch: int = 16,
    checkpoint: str | Path | None = None,
    draft: str | Path | None = None,
    seed: int = 0,
    debug: bool = False,
) -> SpeculativeEngine:
    """Create an engine over the models that ship with graphkit, or of folders.

    Nothing is captured yet.

    Args:
        algorithm: One of ``ALGORITHMS``.
        topk: Branches per draft step: 1 drafts chains, more drafts trees.
        num_steps: Draft steps.
        num_draft_tokens: Nodes verified per request, the bonus token included; ``None`` takes
            ``num_steps + 1`` for a chain and twice that for a tree.
        max_batch_size: Most requests that run at the same time.
        max_context_len: Most tokens of a request, drafts included.
        page_size: Slots per KV page.
        batch_sizes: As for ``SpeculativeEngine``.
        device: As for ``SpeculativeEngine``.
        backend: As for ``SpeculativeEngine``.
        generation: As for ``SpeculativeEngine``.
        steps_per_launch: As for ``SpeculativeEngine``.
        seed: As for ``SpeculativeEngine``.
        debug: As for ``SpeculativeEngine``.
        dtype: Data type of weights and KV. In bfloat16, the output of a request can depend on the
            batch that it runs in, where two logits nearly tie. float32 makes such ties rare.
        attention: Attention backend; ``None`` takes Triton on CUDA and torch elsewhere.
        checkpoint: Folder of a different target. Supported for NONE and NGRAM, which need no
            trained draft model, and for EAGLE with ``draft``.
        draft: Folder of an EAGLE head that was trained for the target. For EAGLE only.

    Raises:
        ConfigError: A setting is out of range, or ``checkpoint`` and ``draft`` do not fit the
            algorithm.
        CheckpointError: A folder cannot be loaded, or the head does not match the target.
    """
    name = _check_algorithm(algorithm, checkpoint, draft)
    spec = _spec(name, num_steps, topk, num_draft_tokens, page_size)
    torch_device = resolve_device(device)
    model = load_checkpoint(checkpoint or default_checkpoint(), device=torch_device, dtype=dtype)
    kind = attention or (TritonAttention if torch_device.type == "cuda" else SdpaAttention)
    requests = ReqToTokenPool(max_batch_size, max_context_len, torch_device)
    pools = PoolFactory(requests, kind, page_size, dtype)
    target_attention = pools.attention(model.config)
    return SpeculativeEngine(
        EngineModel(VerifyForward(model, target_attention), target_attention),
        _drafter(name, model, pools, num_steps, draft),
        spec=spec,
        sizes=BufferSizes(
            max_batch_size=max_batch_size,
            max_context_len=max_context_len,
            hidden_size=model.config.hidden_size,
            vocab_size=model.config.vocab_size,
            dtype=dtype,
            page_size=page_size,
        ),
        batch_sizes=batch_sizes,
        device=torch_device,
        backend=backend,
        generation=generation,
        steps_per_launch=steps_per_launch,
        bos_token_id=END_OF_TEXT if checkpoint is None else None,
        seed=seed,
        debug=debug,
    )


def _check_algorithm(
    algorithm: str, checkpoint: str | Path | None, draft: str | Path | None
) -> str:
    name = algorithm.upper()
    if name not in ALGORITHMS:
        raise ConfigError(
            f"algorithm {algorithm!r} has no reference drafter. Use one of "
            f"{', '.join(ALGORITHMS)}.",
            field="algorithm",
        )
    if draft is not None and name != "EAGLE":
        raise ConfigError(
            f"{name} takes no draft head, but {str(draft)!r} is given as one. Use EAGLE, or omit "
            "the draft head.",
            field="draft",
        )
    if checkpoint is not None and draft is None and name not in ("NONE", "NGRAM"):
        raise ConfigError(
            f"{name} needs a draft model trained for its target, and graphkit has none for "
            f"{str(checkpoint)!r}. Use NONE or NGRAM, or EAGLE with a draft head for it.",
            field="checkpoint",
        )
    return name


def _spec(
    name: str, num_steps: int, topk: int, num_draft_tokens: int | None, page_size: int
) -> SpecConfig:
    if name == "NONE":
        return SpecConfig(name, num_steps=0, topk=1, num_draft_tokens=1, page_size=page_size)
    width = num_draft_tokens
    if width is None:
        width = num_steps + 1 if topk == 1 else 2 * (num_steps + 1)
    kind = "EAGLE" if name == "MULTI_LAYER_EAGLE" else name
    return SpecConfig(kind, num_steps, topk, width, page_size=page_size)


def _drafter(
    name: str, model: LlamaModel, pools: PoolFactory, num_steps: int, draft: str | Path | None
) -> Drafter | None:
    makers: dict[str, Callable[[], Drafter]] = {
        "EAGLE": lambda: _eagle(model, pools, draft),
        "MULTI_LAYER_EAGLE": lambda: _multi_layer(model, pools, num_steps),
        "STANDALONE": lambda: _standalone(pools),
        "NGRAM": NgramDrafter,
    }
    return makers[name]() if name in makers else None


def _eagle(model: LlamaModel, pools: PoolFactory, folder: str | Path | None) -> Drafter:
    head = load_eagle_head(default_eagle_checkpoint() if folder is None else folder, model)
    attention = pools.attention(head.config)
    return EagleDrafter(EngineModel(EagleForward(head, attention), attention))


def _multi_layer(model: LlamaModel, pools: PoolFactory, num_steps: int) -> Drafter:
    head = load_mtp_head(default_mtp_checkpoint(), model)
    layers = head.config.num_hidden_layers
    if not 1 <= num_steps <= layers:
        raise ConfigError(
            f"num_steps is {num_steps}, but the reference MTP chain has {layers} layers, one per "
            f"step. Set num_steps to a value from 1 to {layers}.",
            field="num_steps",
        )
    attention = pools.attention(head.config)
    forwards = [MTPForward(head, layer, attention) for layer in range(num_steps)]
    return MultiLayerDrafter(EngineModel(forwards, attention))


def _standalone(pools: PoolFactory) -> Drafter:
    folder = default_standalone_checkpoint()
    model = load_checkpoint(folder, device=pools.requests.device, dtype=pools.dtype)
    attention = pools.attention(model.config)
    return EagleDrafter(EngineModel(StandaloneForward(model, attention), attention))
