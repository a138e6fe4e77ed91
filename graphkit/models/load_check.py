"""The check of a loaded model: its logits through graphkit against those of transformers."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch
from torch import nn

from graphkit.errors import ConfigError
from graphkit.models.folder_weights import StoredRows
from graphkit.models.model import TransformersModel
from graphkit.models.wrapper.comparison import check_wrapper
from graphkit.models.wrapper.requests import BEYOND_WINDOW, window_settings
from graphkit.spec import ForwardMode

logger = logging.getLogger(__name__)
_QUANTISED_TOLERANCE = 2.0**15
"""Tolerance of a quantised model that computes in float32: 1/32 of the largest logit.

Activations that are rounded to eight bits differ by a whole step where the last bits before
differ.
"""
_LAYER_TOLERANCE = 1e-4
"""Largest difference of a product of a quantised layer in float32, over its size."""
_USUAL_CONTEXT = 256
_LARGEST_WINDOW = 1024
"""Largest window or chunk that the prompt of the check exceeds: longer prompts take long to run."""

_WITHOUT_WINDOW = frozenset({"full_attention", "linear_attention"})
"""Types of layers, in configs, that see all tokens before them."""


def check_loaded(loaded: TransformersModel, stored_rows: StoredRows | None = None) -> None:
    """Compare a prepared model with its folder, and its logits with those of the model itself.

    Logs at INFO if the model has a window that is too large for the prompts of the check.

    Raises:
        ConfigError: They differ by more than rounding.
        TargetError: The logits of the model depend on later tokens.
    """
    for name, (rows, weight) in (stored_rows or {}).items():
        _check_layer(name, loaded.original.get_submodule(name), rows, weight, loaded.dtype)
    is_quantised = getattr(loaded.model, "hf_quantizer", None) is not None
    is_wide = loaded.model.dtype.itemsize > 2
    name, context = type(loaded.model).__name__, _context_len(loaded)
    try:
        record = check_wrapper(
            # Ranks run the same forwards: without a graph, they need no agreement.
            replace(loaded.target(max_batch_size=2, max_context_len=context), group=None),
            device=loaded.device.type,
            tolerance=_QUANTISED_TOLERANCE if is_quantised and is_wide else 1.0,
        )
    except AssertionError as error:
        raise ConfigError(
            f"{name} computes other logits through graphkit: {error}", field="folder_or_model"
        ) from error
    left = [window for window in _windows(loaded).items() if window[1] >= record.prompt_length]
    if left:
        longest = max(size for _, size in left) + BEYOND_WINDOW + _num_nodes(loaded)
        logger.info(
            "the check of %s at load does not test %s: its prompts have at most %d tokens. To test "
            "it, call graphkit.testing.check_wrapper(model.target(max_context_len=%d)).",
            name, " and ".join(f"{setting} {size}" for setting, size in left), record.prompt_length,
            min(longest, loaded.longest_context or longest),
        )  # fmt: skip


def _check_layer(
    name: str, layer: nn.Module, rows: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype
) -> None:
    """Compare products of a quantised layer with those of rows that its folder stores.

    Raises:
        ConfigError: They differ by more than rounding.
    """
    bias: torch.Tensor | None = layer.bias  # type: ignore[assignment]
    device = next(layer.parameters()).device
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(4, weight.shape[1], generator=generator).to(dtype)
    got = layer.forward(inputs.to(device)).float().cpu()[:, rows]  # without the sum over ranks
    expected = inputs.float() @ weight.T.cpu()
    if bias is not None:
        expected = expected + bias.float().cpu()[rows]
    difference, size = (got - expected).norm(dim=0), expected.norm(dim=0)
    allowed = max(_LAYER_TOLERANCE, 8 * torch.finfo(dtype).eps)
    if not bool((difference <= allowed * size.clamp(min=float(size.mean()) / 16)).all()):
        raise ConfigError(
            f"{name} computes other products than its quantised weight in the folder. Report this "
            "with config.json of the folder; check=False skips the comparison.",
            field="folder_or_model",
        )


def _context_len(loaded: TransformersModel) -> int | None:
    """Return the context in which prompts exceed the windows of a model that are not too large."""
    sizes = [size for size in _windows(loaded).values() if size <= _LARGEST_WINDOW]
    needed = max(sizes, default=0) + BEYOND_WINDOW + _num_nodes(loaded)
    if needed <= _USUAL_CONTEXT:
        return None
    return min(needed, loaded.longest_context or needed)


def _windows(loaded: TransformersModel) -> dict[str, int]:
    """Return the windows, chunks and selections of keys that change a text, by setting."""
    config, positions = loaded.model.config.get_text_config(decoder=True), loaded.longest_context
    kinds = set(getattr(config, "layer_types", None) or [""])
    if kinds <= _WITHOUT_WINDOW and not loaded.layout.indexers:
        return {}  # the config names a window that no layer has
    return {
        name: size
        for name, size in window_settings(loaded.model).items()
        if positions is None or size < positions
    }


def _num_nodes(loaded: TransformersModel) -> int:
    return loaded.spec().tokens_per_request(ForwardMode.TARGET_VERIFY)
