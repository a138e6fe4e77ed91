"""An engine over the reference models, for every algorithm that has a reference drafter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Unpack

import torch

from graphkit.config import require_type
from graphkit.distributed import RankGroup
from graphkit.engine import EngineModel, EngineOptions, SpeculativeEngine
from graphkit.engine.attention import PagedAttention
from graphkit.engine.kv import ReqToTokenPool
from graphkit.graphs import resolve_device
from graphkit.models.byte_tokenizer import END_OF_TEXT
from graphkit.models.pools import attention_class
from graphkit.models.sharded.engine_models import (
    EngineModels,
    check_algorithm,
    load_models,
)
from graphkit.models.sharded.pools import PoolFactory
from graphkit.models.sharded.runner_forwards import VerifyForward
from graphkit.runners.settings import show_options
from graphkit.spec import SpecConfig
from graphkit.spec.config import default_spec


@show_options(SpeculativeEngine.__init__, EngineOptions)
def reference_engine(
    algorithm: str = "EAGLE",
    *,
    topk: int = 1,
    num_steps: int | Sequence[int] = 3,
    num_draft_tokens: int | None = None,
    max_batch_size: int = 8,
    max_context_len: int = 1024,
    page_size: int = 1,
    device: torch.device | str = "auto",
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    attention: type[PagedAttention] | None = None,
    group: RankGroup | None = None,
    **options: Unpack[EngineOptions],
) -> SpeculativeEngine:
    """Create an engine over the models that ship with graphkit; ``hf.load`` takes folders.

    Nothing is captured yet. Arguments not listed are those of ``SpeculativeEngine``. By default,
    the target's end-of-text token is the ``bos_token_id``.

    Args:
        algorithm: One of ``ALGORITHMS``.
        topk: Branches per draft step: 1 drafts chains, more drafts trees.
        num_steps: Draft steps, or several ascending numbers of them; see ``SpecConfig``.
        num_draft_tokens: Nodes verified per request, the bonus token included; ``None`` selects
            ``num_steps + 1`` for a chain and twice that for a tree.
        max_batch_size: Most requests that run at the same time.
        max_context_len: Most tokens of a request, drafts included.
        page_size: Slots per KV page.
        device: As for ``SpeculativeEngine``.
        dtype: Data type of weights and hidden states. In bfloat16, the output of a request can
            depend on the batch that it runs in, where two logits nearly tie. float32 makes such
            ties rare.
        kv_dtype: Data type of the target's keys and values, such as ``torch.float8_e4m3fn``;
            ``None`` selects ``dtype``.
        attention: Attention backend; ``None`` selects Triton on CUDA and torch elsewhere.
        group: As for ``SpeculativeEngine``; its ranks split the target.

    Raises:
        ConfigError: A setting is out of range.
    """
    name = check_algorithm(algorithm)
    spec = spec_of(name, num_steps, topk, num_draft_tokens, page_size)
    models = load_models(name, device=resolve_device(device), dtype=dtype, group=group)
    options.setdefault("bos_token_id", END_OF_TEXT)
    return engine_of(
        models,
        spec,
        max_batch_size=max_batch_size,
        max_context_len=max_context_len,
        kv_dtype=kv_dtype,
        attention=attention,
        **options,
    )


@show_options(SpeculativeEngine.__init__, EngineOptions)
def engine_of(
    models: EngineModels,
    spec: SpecConfig,
    *,
    max_batch_size: int = 8,
    max_context_len: int = 1024,
    kv_dtype: torch.dtype | None = None,
    attention: type[PagedAttention] | None = None,
    **options: Unpack[EngineOptions],
) -> SpeculativeEngine:
    """Create an engine over models that several engines can share, with KV pools of its own.

    ``spec`` is what ``spec_of`` returns for the algorithm of the models. The next four arguments
    are those of ``reference_engine``, all others those of ``SpeculativeEngine``. Nothing is
    captured yet.

    Raises:
        ConfigError: A setting is out of range.
    """
    require_type(
        "engine_of", "models", models, EngineModels, "a graphkit.models.sharded.EngineModels"
    )
    require_type("engine_of", "spec", spec, SpecConfig, "a graphkit.SpecConfig")
    device, target = models.device, models.target
    kind = attention_class(attention, device)
    sizes = models.sizes(max_batch_size, max_context_len, spec.page_size)
    requests = ReqToTokenPool(max_batch_size, max_context_len, device)
    pools = PoolFactory(requests, kind, spec.page_size, models.dtype)
    attention_of_target = replace(pools, dtype=kv_dtype or pools.dtype).attention(target.config)
    forward = VerifyForward(target, attention_of_target, models.aux_layers)
    return SpeculativeEngine(
        EngineModel(forward, attention_of_target),
        models.drafter(pools, spec.longest.num_steps),
        spec=spec,
        sizes=sizes,
        device=device,
        group=models.group,
        **options,
    )


def spec_of(
    algorithm: str,
    num_steps: int | Sequence[int] = 3,
    topk: int = 1,
    num_draft_tokens: int | None = None,
    page_size: int = 1,
) -> SpecConfig:
    """Return the settings of one of ``ALGORITHMS``; arguments as for ``reference_engine``.

    Raises:
        ConfigError: A setting is out of range.
    """
    kind = "EAGLE" if algorithm == "MULTI_LAYER_EAGLE" else algorithm
    return default_spec(kind, num_steps, topk, num_draft_tokens, page_size)
