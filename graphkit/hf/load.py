"""Load a causal language model of transformers, check it, and prepare it for capture."""

from __future__ import annotations

from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from graphkit.errors import CheckpointError, ConfigError
from graphkit.graphs import resolve_device
from graphkit.hf.attention import IMPLEMENTATION
from graphkit.hf.fusion import fuse_modules
from graphkit.hf.layout import ModelLayout, learn_layout
from graphkit.hf.model import TransformersModel
from graphkit.hf.recurrent import convert_mixers

_EXPERTS = "batched_mm"
"""Products of all experts with static shapes; the other forms wait for the router on the host."""


def load(
    folder_or_model: str | Path | PreTrainedModel,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "auto",
    fuse: bool = True,
    check: bool = True,
    trust_remote_code: bool = False,
) -> TransformersModel:
    """Load a causal language model of transformers for capture.

    No architecture is known by name. The shapes of keys, values and recurrent states are learnt
    from one forward with the model's own cache. Attention runs through the attention registry of
    transformers, recurrent layers through the interface of its cache.

    Args:
        folder_or_model: A folder with ``config.json`` and weights, or a model of transformers. A
            model object is changed in place: it then runs through graphkit alone.
        dtype: Data type of the weights; ``None`` keeps that of the folder or the model.
        device: ``auto``, ``cpu`` or ``cuda``; a model object is moved there.
        fuse: Whether linear layers of one input become one product, and norms, gated networks and
            the rotation of heads run through graphkit's ops, where both compute the same on random
            inputs, up to rounding. ``layout.replaced`` of the result names these modules.
        check: Whether the logits of the result are compared with those of the model, as
            ``testing.check_wrapper`` does.
        trust_remote_code: As in transformers.

    Raises:
        CheckpointError: The folder cannot be loaded.
        ConfigError: The model keeps state that graphkit has no pool for, or a layer does not
            attend through the registry, or the result computes other logits.
        TargetError: The logits of the model depend on later tokens.

    Examples:
        >>> model = gk.hf.load("models/Qwen3-0.6B")  # doctest: +SKIP
        >>> engine = model.engine(algorithm="NGRAM", num_steps=3)  # doctest: +SKIP
    """
    where = resolve_device(device)
    folder = None
    if isinstance(folder_or_model, PreTrainedModel):
        model = folder_or_model if dtype is None else nn.Module.to(folder_or_model, dtype)
    else:
        folder = str(folder_or_model)
        model = _from_folder(Path(folder), dtype, trust_remote_code)
    nn.Module.to(model, where)
    nn.Module.eval(model).requires_grad_(False)
    original = _shared_copy(model)
    layout = prepare_model(model, fuse=fuse)
    loaded = TransformersModel(model, original, layout, folder)
    if check:
        _check(loaded)
    return loaded


def prepare_model(model: PreTrainedModel, *, fuse: bool = True) -> ModelLayout:
    """Let a model run over graphkit's pools, in place, and return its layers with state.

    Args:
        model: The model.
        fuse: See ``load``.

    Raises:
        ConfigError: See ``load``.
    """
    for config in (
        model.config,
        *(getattr(model.config, name) for name in model.config.sub_configs),
    ):
        config._attn_implementation = IMPLEMENTATION
    with suppress(ValueError):  # the model has no experts, or one form of them
        model.set_experts_implementation(_EXPERTS)
    layout = learn_layout(model)
    if fuse:
        layout = fuse_modules(model, layout)
    convert_mixers(model, layout)
    return layout


def _from_folder(
    folder: Path, dtype: torch.dtype | None, trust_remote_code: bool
) -> PreTrainedModel:
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder} has no config.json. Pass a folder of transformers.")
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code, "local_files_only": True}
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype or "auto", **options
        )
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"{folder} cannot be loaded by transformers: {line}") from error
    return model


def _shared_copy(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy that shares the weights and runs as transformers runs it."""
    memo = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    copy = deepcopy(model, memo)
    copy.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
    return copy


def _check(loaded: TransformersModel) -> None:
    from graphkit.testing import check_wrapper

    try:
        check_wrapper(loaded.target(max_batch_size=2), device=loaded.device.type)
    except AssertionError as error:
        raise ConfigError(
            f"{type(loaded.model).__name__} computes other logits through graphkit: {error}",
            field="folder_or_model",
        ) from error
