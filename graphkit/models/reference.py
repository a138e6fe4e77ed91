"""The reference model: a small trained Llama whose tokens are bytes, with draft models of its own.

Both are folders of transformers, in ``weights``, and ``load`` reads them like any other folder.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from graphkit.distributed import RankGroup
from graphkit.engine import SpeculativeEngine
from graphkit.engine.attention import PagedAttention
from graphkit.errors import CheckpointError
from graphkit.graphs import resolve_device
from graphkit.models.drafted_model import check_algorithm
from graphkit.models.loader import load
from graphkit.models.model import TransformersModel
from graphkit.models.tokenizer import END_OF_TEXT
from graphkit.runners.targets import CaptureTarget

_WEIGHTS = Path(__file__).parent / "weights"
_DRAFTS = {
    "EAGLE": "eagle", "EAGLE3": "eagle3", "MULTI_LAYER_EAGLE": "mtp", "STANDALONE": "standalone",
    "DFLASH": "dflash",
}  # fmt: skip
"""The folder of each algorithm's draft model."""
ALGORITHMS = ("NONE", "EAGLE", "EAGLE3", "MULTI_LAYER_EAGLE", "STANDALONE", "NGRAM", "DFLASH")
"""Algorithms of the reference model. MULTI_LAYER_EAGLE is EAGLE with a chain of draft layers."""
_CONTEXT = 128
"""Most tokens of a request of a target, drafts included."""


def default_checkpoint(kind: str = "target") -> Path:
    """Return the folder of trained weights that ship with the package.

    Args:
        kind: ``target`` (the reference model), or what drafts for it: ``standalone`` (a small
            language model), ``eagle``, ``eagle3``, ``mtp`` or ``dflash`` (heads).

    Raises:
        CheckpointError: There are no such weights.
    """
    kinds = sorted(folder.name for folder in _WEIGHTS.iterdir())
    if kind not in kinds:
        raise CheckpointError(f"graphkit has no weights {kind!r}: kinds are {', '.join(kinds)}.")
    return _WEIGHTS / kind


def reference_model(
    algorithm: str = "EAGLE",
    *,
    device: torch.device | str = "auto",
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> TransformersModel:
    """Load the reference model, and its draft model for an algorithm.

    Args:
        algorithm: One of ``ALGORITHMS``.
        device: ``auto``, ``cpu`` or ``cuda``.
        dtype: Data type of weights and hidden states. In bfloat16, the output of a request can
            depend on the batch that it runs in, where two logits nearly tie. float32 makes such
            ties rare.
        **options: ``quantize``, ``group`` and ``row_invariant`` of ``load``.

    Raises:
        ConfigError: An argument is unknown or out of range.
    """
    name = check_algorithm(algorithm, ALGORITHMS)
    draft = default_checkpoint(_DRAFTS[name]) if name in _DRAFTS else None
    with _without_progress():
        return load(
            default_checkpoint(), draft=draft, algorithm=name, dtype=dtype, device=device,
            check=False, **options,
        )  # fmt: skip


def reference_engine(
    algorithm: str = "EAGLE",
    *,
    device: torch.device | str = "auto",
    dtype: torch.dtype = torch.float32,
    quantize: str | None = None,
    group: RankGroup | None = None,
    **options: Any,
) -> SpeculativeEngine:
    """Create an engine over the reference model. Nothing is captured yet.

    By default, the end-of-text token is the ``bos_token_id``. The arguments are those of
    ``reference_model``, and ``options`` those of ``TransformersModel.engine``.

    Raises:
        ConfigError: A setting is out of range.
    """
    model = reference_model(algorithm, device=device, dtype=dtype, quantize=quantize, group=group)
    return model.engine(**{"bos_token_id": END_OF_TEXT, **options})


def reference_target(
    device: str = "cpu",
    *,
    topk: int = 1,
    max_batch_size: int | None = None,
    attention: type[PagedAttention] | None = None,
    **options: Any,
) -> CaptureTarget:
    """Create a target of the reference model with its EAGLE head and its MTP layers.

    Args:
        device: ``cpu``, where the models run in float32, or a CUDA device, where they run in
            bfloat16.
        topk: 1 drafts and verifies chains of 4 tokens. More drafts trees of 8 tokens.
        max_batch_size: Number of requests; ``None`` selects 64 on CUDA and 8 elsewhere.
        attention: Attention backend; ``None`` selects Triton on CUDA and torch elsewhere.
        **options: As for ``reference_model``.

    Raises:
        ConfigError: An argument has a wrong type or is out of range.
    """
    model = _on(device, "EAGLE", **options)
    kept = {name: value for name, value in options.items() if name != "group"}
    from graphkit.models.heads.load import load_draft

    with _without_progress():
        chain = load_draft("MTP", default_checkpoint("mtp"), model, None, **kept)
    target = _target(model, max_batch_size, topk=topk, attention=attention, chain=chain)
    return replace(target, name="reference model")


def eagle3_target(
    device: str = "cpu", *, topk: int = 1, max_batch_size: int | None = None
) -> CaptureTarget:
    """Create a target of the reference model and its EAGLE-3 head; see ``reference_target``."""
    target = _target(_on(device, "EAGLE3"), max_batch_size, topk=topk)
    return replace(target, name="reference model with EAGLE-3")


def dflash_target(device: str = "cpu", *, max_batch_size: int | None = None) -> CaptureTarget:
    """Create a target of the reference model and its DFLASH head; see ``reference_target``.

    STEP is the whole step of an engine, with the blocks of the head and its context.
    """
    target = _target(_on(device, "DFLASH"), max_batch_size)
    return replace(target, name="reference model with DFLASH")


def _on(device: str, algorithm: str, **options: Any) -> TransformersModel:
    """Load the models: in bfloat16 on CUDA, in float32 elsewhere."""
    used = resolve_device(device)
    dtype = torch.bfloat16 if used.type == "cuda" else torch.float32
    return reference_model(algorithm, device=used, dtype=dtype, **options)


def _target(model: TransformersModel, max_batch_size: int | None, **settings: Any) -> CaptureTarget:
    is_cuda = model.device.type == "cuda"
    count = (64 if is_cuda else 8) if max_batch_size is None else max_batch_size
    sizes = None if is_cuda or max_batch_size is not None else (1, 2, 4, 8)
    target = model.target(max_batch_size=count, max_context_len=_CONTEXT, **settings)
    return replace(target, batch_sizes=sizes)


@contextmanager
def _without_progress() -> Iterator[None]:
    """Let transformers print no progress bar."""
    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]
