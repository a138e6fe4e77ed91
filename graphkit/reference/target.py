"""The reference models as a capture target: what ``graphkit capture`` works on by default."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from graphkit.attention import PagedAttention, SdpaAttention, TritonAttention
from graphkit.config import BufferSizes
from graphkit.graphs import tensors_of
from graphkit.kv import ReqToTokenPool
from graphkit.reference.checkpoint import default_checkpoint, load_checkpoint
from graphkit.reference.draft_checkpoint import (
    default_eagle_checkpoint,
    default_mtp_checkpoint,
    load_eagle_head,
    load_mtp_head,
)
from graphkit.reference.eagle import EagleHead
from graphkit.reference.engine import Pools
from graphkit.reference.forwards import EagleForward, MTPForward, VerifyForward
from graphkit.reference.model import LlamaModel
from graphkit.reference.mtp import MTPHead
from graphkit.reference.sample_batches import SampleBatches
from graphkit.reference.sample_requests import CONTEXT, SampleRequests
from graphkit.spec import ForwardMode, SpecConfig
from graphkit.targets import CaptureTarget

_STEPS = 3


def reference_target(
    device: str = "cpu",
    *,
    topk: int = 1,
    max_batch_size: int | None = None,
    checkpoint: str | Path | None = None,
    attention: type[PagedAttention] | None = None,
) -> CaptureTarget:
    """A Llama-layout model and its draft models in the middle of real text.

    Args:
        device: ``cpu``, where the models run in float32, or a CUDA device, in bfloat16.
        topk: 1 drafts and verifies chains of 4 tokens, more drafts trees of 8 and verifies random
            ones.
        max_batch_size: Requests; ``None`` makes 64 on CUDA and 8 elsewhere.
        checkpoint: Any local Llama, Qwen2 or Qwen3 folder, for which there are no draft models:
            TARGET_VERIFY and DECODE alone. ``None`` takes what ships, with all modes.
        attention: Backend; ``None`` takes Triton on CUDA, torch elsewhere.

    Raises:
        CheckpointError: The folder cannot be loaded.
        ConfigError: ``topk`` is out of range.
    """
    dtype = torch.bfloat16 if torch.device(device).type == "cuda" else torch.float32
    model = load_checkpoint(checkpoint or default_checkpoint(), device=device, dtype=dtype)
    options: dict[str, Any] = {"topk": topk, "max_batch_size": max_batch_size}
    if checkpoint is not None:
        name = f"reference {Path(checkpoint).name}"
        return model_target(model, name=name, attention=attention, **options)
    return model_target(
        model,
        load_eagle_head(default_eagle_checkpoint(), model),
        load_mtp_head(default_mtp_checkpoint(), model),
        name="reference model",
        attention=attention,
        **options,
    )


def tree_target(device: str = "cpu") -> CaptureTarget:
    """``reference_target`` with trees of 8 tokens instead of chains of 4."""
    return reference_target(device, topk=2)


def model_target(
    model: LlamaModel,
    eagle: EagleHead | None = None,
    mtp: MTPHead | None = None,
    *,
    name: str,
    topk: int = 1,
    max_batch_size: int | None = None,
    attention: type[PagedAttention] | None = None,
) -> CaptureTarget:
    """Models in the middle of real text, on the device and in the dtype that they have.

    Args:
        model: For TARGET_VERIFY and DECODE.
        eagle: For DRAFT, DRAFT_EXTEND and DRAFT_EXTEND_V2; without it there are none.
        mtp: For MULTI_LAYER_EAGLE, with at least 3 layers.
        name: Shown to people.
        topk: As for ``reference_target``.
        max_batch_size: As for ``reference_target``.
        attention: As for ``reference_target``.

    Raises:
        ConfigError: ``topk`` is out of range.
    """
    weight = model.lm_head.weight
    is_cuda = weight.device.type == "cuda"
    count = max_batch_size or (64 if is_cuda else 8)
    kind = attention or (TritonAttention if is_cuda else SdpaAttention)
    spec = SpecConfig("EAGLE", _STEPS, topk, _STEPS + 1 if topk == 1 else 2 * (_STEPS + 1))
    pools = Pools(ReqToTokenPool(count, CONTEXT, weight.device), kind, 1, weight.dtype)
    requests = SampleRequests(count, spec, pools.requests)
    parts = list(_parts(model, eagle, mtp, pools, requests))
    return CaptureTarget(
        name=name,
        spec=spec,
        sizes=BufferSizes(
            max_batch_size=count,
            max_context_len=CONTEXT,
            hidden_size=model.config.hidden_size,
            vocab_size=model.config.vocab_size,
            dtype=weight.dtype,
        ),
        forwards={mode: part.forward for part in parts for mode in part.modes},
        sample_batch=SampleBatches(requests),
        weights=_named({part.name: tensors_of(part.model) for part in parts}),
        mutable_state=_named({part.name: part.attention.kv_pool.tensors() for part in parts}),
        attention={mode: part.attention for part in parts for mode in part.modes},
        batch_sizes=None if is_cuda or max_batch_size else (1, 2, 4, 8),
    )


@dataclass(frozen=True, slots=True)
class _Part:
    """One of the models, with a KV pool of its own."""

    name: str
    model: nn.Module
    attention: PagedAttention
    forward: Any
    modes: tuple[ForwardMode, ...]


def _parts(
    model: LlamaModel,
    eagle: EagleHead | None,
    mtp: MTPHead | None,
    pools: Pools,
    requests: SampleRequests,
) -> Iterator[_Part]:
    """The models, each having read the requests."""
    attention = pools.attention(model.config)
    requests.read_by_target(model, attention)
    modes: tuple[ForwardMode, ...] = (ForwardMode.TARGET_VERIFY, ForwardMode.DECODE)
    yield _Part("target", model, attention, VerifyForward(model, attention), modes)
    if eagle is not None:
        attention = pools.attention(eagle.config)
        requests.read_by_eagle(eagle, attention)
        modes = (ForwardMode.DRAFT, ForwardMode.DRAFT_EXTEND, ForwardMode.DRAFT_EXTEND_V2)
        yield _Part("draft", eagle, attention, EagleForward(eagle, attention), modes)
    if mtp is not None:
        attention = pools.attention(mtp.config)
        requests.read_by_mtp(mtp, attention)
        layers = range(min(_STEPS, mtp.config.num_hidden_layers))
        chain = [MTPForward(mtp, layer, attention) for layer in layers]
        yield _Part("mtp", mtp, attention, chain, (ForwardMode.MULTI_LAYER_EAGLE,))


def _named(parts: Mapping[str, Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Tensors of all parts, the part's name before each."""
    return {f"{part}.{name}": tensor for part, own in parts.items() for name, tensor in own.items()}
