"""An engine over the reference models, for every algorithm that graphkit drafts with."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
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
from graphkit.kv import MHATokenToKVPool, ReqToTokenPool
from graphkit.reference.checkpoint import (
    default_checkpoint,
    default_standalone_checkpoint,
    load_checkpoint,
)
from graphkit.reference.config import LlamaConfig
from graphkit.reference.draft_checkpoint import (
    default_eagle_checkpoint,
    default_mtp_checkpoint,
    load_eagle_head,
    load_mtp_head,
)
from graphkit.reference.forwards import (
    EagleForward,
    MTPForward,
    StandaloneForward,
    VerifyForward,
)
from graphkit.reference.model import LlamaModel
from graphkit.reference.tokenizer import END_OF_TEXT
from graphkit.spec import SpecConfig

ALGORITHMS = ("NONE", "EAGLE", "MULTI_LAYER_EAGLE", "STANDALONE", "NGRAM")
"""What ``reference_engine`` drafts with. MULTI_LAYER_EAGLE is EAGLE with a chain of layers."""


@dataclass(frozen=True, slots=True)
class Pools:
    """Makes attention backends, each over a KV pool of its own, behind one request pool.

    Attributes:
        requests: Shared by all models.
        kind: The backend.
        page_size: Slots per page.
        dtype: Of keys and values.
    """

    requests: ReqToTokenPool
    kind: type[PagedAttention]
    page_size: int
    dtype: torch.dtype

    def attention(self, config: LlamaConfig) -> PagedAttention:
        """A backend with room for every request at its longest."""
        tokens = -(-self.requests.max_context_len // self.page_size) * self.page_size
        pool = MHATokenToKVPool(
            self.requests.size * tokens, self.page_size, self.dtype, config.num_key_value_heads,
            config.head_dim, config.num_hidden_layers, self.requests.device,
        )  # fmt: skip
        return self.kind(self.requests, pool)


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
    generation: Literal["v1", "v2"] | None = None,
    checkpoint: str | Path | None = None,
    seed: int = 0,
    debug: bool = False,
) -> SpeculativeEngine:
    """An engine whose target and draft models ship with graphkit; nothing is captured yet.

    Args:
        algorithm: One of ``ALGORITHMS``.
        topk: 1 drafts chains, more drafts trees.
        num_steps: Draft steps.
        num_draft_tokens: Nodes verified per request, the root included; ``None`` takes
            ``num_steps + 1`` for a chain and twice that for a tree.
        max_batch_size: Most requests at once.
        max_context_len: Most tokens of a request, drafts included.
        page_size: Slots per KV page.
        batch_sizes: Sizes to capture; ``None`` takes the field's list.
        device: As for ``SpeculativeEngine``.
        backend: As for ``SpeculativeEngine``.
        generation: As for ``SpeculativeEngine``.
        seed: As for ``SpeculativeEngine``.
        debug: As for ``SpeculativeEngine``.
        dtype: Of weights and KV. float32 makes output independent of the batch that a request
            happens to be in, up to its last bits; in bfloat16 near ties may fall either way.
        attention: Backend; ``None`` takes Triton on CUDA, torch elsewhere.
        checkpoint: Another target, for algorithms without trained heads: NONE and NGRAM.

    Raises:
        ConfigError: A setting is out of range, or another target has no draft model.
        CheckpointError: The folder cannot be loaded.
    """
    name = _known(algorithm, checkpoint)
    place = resolve_device(device)
    model = load_checkpoint(checkpoint or default_checkpoint(), device=place, dtype=dtype)
    kind = attention or (TritonAttention if place.type == "cuda" else SdpaAttention)
    pools = Pools(ReqToTokenPool(max_batch_size, max_context_len, place), kind, page_size, dtype)
    target_attention = pools.attention(model.config)
    return SpeculativeEngine(
        EngineModel(VerifyForward(model, target_attention), target_attention),
        _drafter(name, model, pools, num_steps),
        spec=_spec(name, num_steps, topk, num_draft_tokens, page_size),
        sizes=BufferSizes(
            max_batch_size=max_batch_size,
            max_context_len=max_context_len,
            hidden_size=model.config.hidden_size,
            vocab_size=model.config.vocab_size,
            dtype=dtype,
            page_size=page_size,
        ),
        batch_sizes=batch_sizes,
        device=place,
        backend=backend,
        generation=generation,
        bos_token_id=END_OF_TEXT,
        seed=seed,
        debug=debug,
    )


def _known(algorithm: str, checkpoint: str | Path | None) -> str:
    name = algorithm.upper()
    if name not in ALGORITHMS:
        raise ConfigError(
            f"algorithm {algorithm!r} has no reference draft model. Use one of "
            f"{', '.join(ALGORITHMS)}.",
            field="algorithm",
        )
    if checkpoint is not None and name not in ("NONE", "NGRAM"):
        raise ConfigError(
            f"the draft models that ship with graphkit were trained for its own target, so "
            f"{name} cannot run with {str(checkpoint)!r}. Use NONE or NGRAM.",
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


def _drafter(name: str, model: LlamaModel, pools: Pools, num_steps: int) -> Drafter | None:
    makers: dict[str, Callable[[], Drafter]] = {
        "EAGLE": lambda: _eagle(model, pools),
        "MULTI_LAYER_EAGLE": lambda: _multi_layer(model, pools, num_steps),
        "STANDALONE": lambda: _standalone(pools),
        "NGRAM": NgramDrafter,
    }
    return makers[name]() if name in makers else None


def _eagle(model: LlamaModel, pools: Pools) -> Drafter:
    head = load_eagle_head(default_eagle_checkpoint(), model)
    attention = pools.attention(head.config)
    return EagleDrafter(EngineModel(EagleForward(head, attention), attention))


def _multi_layer(model: LlamaModel, pools: Pools, num_steps: int) -> Drafter:
    head = load_mtp_head(default_mtp_checkpoint(), model)
    layers = head.config.num_hidden_layers
    if not 1 <= num_steps <= layers:
        raise ConfigError(
            f"num_steps is {num_steps}, but the reference chain has {layers} layers. Use 1 to "
            f"{layers}.",
            field="num_steps",
        )
    attention = pools.attention(head.config)
    forwards = [MTPForward(head, layer, attention) for layer in range(num_steps)]
    return MultiLayerDrafter(EngineModel(forwards, attention))


def _standalone(pools: Pools) -> Drafter:
    folder = default_standalone_checkpoint()
    model = load_checkpoint(folder, device=pools.requests.device, dtype=pools.dtype)
    attention = pools.attention(model.config)
    return EagleDrafter(EngineModel(StandaloneForward(model, attention), attention))
