"""Capture targets of the reference models, the default of ``graphkit capture``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Any

import torch
from torch import nn

from graphkit.config import require_type
from graphkit.distributed import RankGroup
from graphkit.engine import SpeculativeEngine
from graphkit.engine.attention import PagedAttention
from graphkit.engine.kv import ReqToTokenPool
from graphkit.errors import ConfigError
from graphkit.graphs import Backend, named_tensors, resolve_device
from graphkit.models.heads.dflash import DFlashHead
from graphkit.models.heads.eagle import EagleHead
from graphkit.models.heads.eagle3 import Eagle3Head
from graphkit.models.heads.folders import load_mtp_head
from graphkit.models.heads.forwards import DFlashForward, EagleForward
from graphkit.models.heads.layers import quantize_layers
from graphkit.models.heads.mtp_chain import MTPHead
from graphkit.models.pools import attention_class
from graphkit.models.sharded.checkpoint import default_checkpoint
from graphkit.models.sharded.engine import engine_of, spec_of
from graphkit.models.sharded.engine_models import EngineModels, load_models
from graphkit.models.sharded.model import LlamaModel
from graphkit.models.sharded.pools import PoolFactory
from graphkit.models.sharded.prefilled_requests import CONTEXT, PrefilledRequests
from graphkit.models.sharded.runner_forwards import MTPForward, VerifyForward
from graphkit.models.sharded.sample_batches import SampleBatches
from graphkit.runners.targets import CaptureTarget
from graphkit.spec import ForwardMode, SpecConfig

_STEPS = 3
_ALGORITHMS = {Eagle3Head: "EAGLE3", DFlashHead: "DFLASH"}


def reference_target(
    device: str = "cpu",
    *,
    topk: int = 1,
    max_batch_size: int | None = None,
    checkpoint: str | Path | None = None,
    attention: type[PagedAttention] | None = None,
    quantize: str | None = None,
    group: RankGroup | None = None,
) -> CaptureTarget:
    """Create a target of a Llama-layout model and its draft models, with prefilled requests.

    Args:
        device: ``cpu``, where the models run in float32, or a CUDA device, where they run in
            bfloat16.
        topk: 1 drafts and verifies chains of 4 tokens. More drafts trees of 8 tokens; sample
            batches of TARGET_VERIFY contain random trees then.
        max_batch_size: Number of requests; ``None`` selects 64 on CUDA and 8 elsewhere.
        checkpoint: A local Llama, Mistral, Qwen2 or Qwen3 folder. The target then has
            TARGET_VERIFY and DECODE only, since there is no draft model for it. ``None`` selects
            the models that ship with graphkit, with all modes.
        attention: Attention backend; ``None`` selects Triton on CUDA and torch elsewhere.
        quantize: As for ``load_models``.
        group: Ranks that split the model; see ``load_checkpoint``.

    Raises:
        CheckpointError: The folder cannot be loaded.
        ConfigError: An argument has a wrong type or is out of range, or ``quantize`` comes with
            ranks.
    """
    algorithm = "EAGLE" if checkpoint is None else "NONE"
    models = _load(algorithm, device, checkpoint=checkpoint, quantize=quantize, group=group)
    options: dict[str, Any] = {"topk": topk, "max_batch_size": max_batch_size}
    if checkpoint is not None:
        name = f"reference {Path(checkpoint).name}"
        return model_target(models.target, name=name, attention=attention, **options)
    head, mtp = models.draft, load_mtp_head(default_checkpoint("mtp"), models.target)  # type: ignore[arg-type]
    assert isinstance(head, EagleHead), "the draft model of EAGLE"
    if quantize is not None:
        quantize_layers(mtp, quantize)
    return model_target(
        models.target, head, mtp, name="reference model", attention=attention, **options
    )


def tree_target(device: str = "cpu") -> CaptureTarget:
    """Create ``reference_target`` with trees of 8 tokens instead of chains of 4."""
    return reference_target(device, topk=2)


def eagle3_target(
    device: str = "cpu", *, topk: int = 1, max_batch_size: int | None = None
) -> CaptureTarget:
    """Create a target of the reference model and its EAGLE-3 head; see ``reference_target``.

    The head reads three layers of the model, so that MULTI_LAYER_EAGLE is left out.
    """
    models = _load("EAGLE3", device)
    assert isinstance(models.draft, Eagle3Head), "the draft model of EAGLE3"
    name = "reference model with EAGLE-3"
    return model_target(
        models.target, models.draft, name=name, topk=topk, max_batch_size=max_batch_size
    )


def dflash_target(device: str = "cpu", *, max_batch_size: int | None = None) -> CaptureTarget:
    """Create a target of the DFLASH head of the reference model; see ``reference_target``.

    TARGET_VERIFY is that of the draft worker, which runs the blocks of the head. STEP is the whole
    step of an engine, with the target's verify and the context of the head.
    """
    models = _load("DFLASH", device)
    assert isinstance(models.draft, DFlashHead), "the draft model of DFLASH"
    name = "DFLASH head of the reference model"
    return model_target(models.target, models.draft, name=name, max_batch_size=max_batch_size)


def _load(algorithm: str, device: str, **options: Any) -> EngineModels:
    """Load models: in bfloat16 on CUDA, in float32 elsewhere; see ``load_models``."""
    found = resolve_device(device)
    dtype = torch.bfloat16 if found.type == "cuda" else torch.float32
    return load_models(algorithm, device=found, dtype=dtype, **options)


def model_target(
    model: LlamaModel,
    head: EagleHead | Eagle3Head | DFlashHead | None = None,
    mtp: MTPHead | None = None,
    *,
    name: str,
    topk: int = 1,
    max_batch_size: int | None = None,
    attention: type[PagedAttention] | None = None,
) -> CaptureTarget:
    """Create a target of loaded models, on their device and in their dtype.

    Args:
        model: Runs TARGET_VERIFY and DECODE.
        head: Runs DRAFT, DRAFT_EXTEND, DRAFT_EXTEND_V2 and, in an engine with ``model``, STEP;
            ``None`` omits these modes. A DFLASH head runs STEP and TARGET_VERIFY, and the target
            is that of its draft worker.
        mtp: Runs MULTI_LAYER_EAGLE; needs at least 3 layers, and hidden states of one target layer,
            so that it goes with no EAGLE-3 or DFLASH head. ``None`` omits the mode.
        name: Name of the target in records and reports.
        topk: As for ``reference_target``.
        max_batch_size: As for ``reference_target``.
        attention: As for ``reference_target``.

    Raises:
        ConfigError: An argument has a wrong type or is out of range, or ``mtp`` comes with such a
            head.
    """
    heads, chains = (EagleHead, Eagle3Head, DFlashHead, NoneType), (MTPHead, NoneType)
    require_type("model_target", "model", model, LlamaModel, "a LlamaModel")
    require_type("model_target", "head", head, heads, "a draft head, or None")
    require_type("model_target", "mtp", mtp, chains, "an MTPHead, or None")
    models = EngineModels(_ALGORITHMS.get(type(head), "EAGLE"), model, head)
    if models.aux_layers and mtp is not None:
        raise ConfigError(
            "mtp reads the hidden states of one target layer, and the other head reads several. "
            "Create a target for each of them.",
            field="mtp",
        )
    weight = model.lm_head.weight
    is_cuda = weight.device.type == "cuda"
    count = (64 if is_cuda else 8) if max_batch_size is None else max_batch_size
    sizes, kind = models.sizes(count, CONTEXT, 1), attention_class(attention, weight.device)
    step = spec = spec_of(models.algorithm, _STEPS, topk)
    optional_fields = None
    if isinstance(head, DFlashHead):
        optional_fields = {ForwardMode.TARGET_VERIFY: ("custom_mask",)}
        spec = replace(spec, is_draft_worker=True, num_draft_tokens=head.block_size)
    pools = PoolFactory(ReqToTokenPool(count, CONTEXT, weight.device), kind, 1, weight.dtype)
    requests = PrefilledRequests(count, spec, pools.requests)
    entries = list(_prefilled_models(models, mtp, pools, requests))
    return CaptureTarget(
        name=name,
        spec=spec,
        sizes=sizes,
        forwards={mode: entry.forward for entry in entries for mode in entry.modes},
        sample_batch=SampleBatches(requests),
        weights=_prefixed({entry.name: named_tensors(entry.model) for entry in entries}),
        mutable_state=_prefixed(
            {entry.name: entry.attention.kv_pool.tensors() for entry in entries}
        ),
        attention={mode: entry.attention for entry in entries for mode in entry.modes},
        batch_sizes=None if is_cuda or max_batch_size is not None else (1, 2, 4, 8),
        optional_fields=optional_fields,
        draft_token_map=models.draft_token_map,
        engine=None if head is None else partial(_engine, models, step, count, kind),
        group=models.group,
    )


def _engine(
    models: EngineModels,
    spec: SpecConfig,
    count: int,
    kind: type[PagedAttention],
    *,
    batch_sizes: Sequence[int] | None,
    backend: Backend | None,
    device: object,
) -> SpeculativeEngine:
    """Create an engine of loaded models, over pools of its own."""
    del device  # that of the models
    return engine_of(
        models,
        spec,
        max_batch_size=count,
        max_context_len=CONTEXT,
        batch_sizes=batch_sizes,
        backend=backend,
        attention=kind,
    )


@dataclass(frozen=True, slots=True)
class _ModelEntry:
    """A model of the target with its attention backend and modes."""

    name: str
    model: nn.Module
    attention: PagedAttention
    forward: Any
    modes: tuple[ForwardMode, ...]


def _prefilled_models(
    models: EngineModels, mtp: MTPHead | None, pools: PoolFactory, requests: PrefilledRequests
) -> Iterator[_ModelEntry]:
    """Yield the models after prefilling the requests with each of them."""
    model, head, layers = models.target, models.draft, models.aux_layers
    attention = pools.attention(model.config)
    requests.prefill_target(model, attention, layers)
    modes: tuple[ForwardMode, ...] = (ForwardMode.TARGET_VERIFY, ForwardMode.DECODE)
    if isinstance(head, DFlashHead):  # runs TARGET_VERIFY itself
        modes = ()
    yield _ModelEntry("target", model, attention, VerifyForward(model, attention, layers), modes)
    if isinstance(head, DFlashHead):
        attention = pools.attention(head.config)
        requests.prefill_dflash(head, attention)
        modes = (ForwardMode.TARGET_VERIFY,)
        yield _ModelEntry("draft", head, attention, DFlashForward(head, attention), modes)
    if isinstance(head, EagleHead | Eagle3Head):
        attention = pools.attention(head.config)
        requests.prefill_eagle(head, attention)
        modes = (ForwardMode.DRAFT, ForwardMode.DRAFT_EXTEND, ForwardMode.DRAFT_EXTEND_V2)
        yield _ModelEntry("draft", head, attention, EagleForward(head, attention), modes)
    if mtp is not None:
        attention = pools.attention(mtp.config)
        requests.prefill_mtp(mtp, attention)
        steps = range(min(_STEPS, mtp.config.num_hidden_layers))
        chain = [MTPForward(mtp, layer, attention) for layer in steps]
        yield _ModelEntry("mtp", mtp, attention, chain, (ForwardMode.MULTI_LAYER_EAGLE,))


def _prefixed(tensors: Mapping[str, Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return the tensors of all models in one dict, each name prefixed with the model's name."""
    return {
        f"{model}.{name}": tensor
        for model, by_name in tensors.items()
        for name, tensor in by_name.items()
    }
