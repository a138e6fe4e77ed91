"""The check of a loaded model: its logits through graphkit against those of transformers."""

from __future__ import annotations

import logging

from graphkit.errors import ConfigError
from graphkit.hf.model import TransformersModel
from graphkit.spec import ForwardMode
from graphkit.verify.wrapper.requests import BEYOND_WINDOW, window_settings

logger = logging.getLogger(__name__)
_QUANTISED_TOLERANCE = 2.0**15
"""Tolerance of a quantised model that computes in float32: 1/32 of the largest logit.

Activations that are rounded to eight bits differ by a whole step where the last bits before
differ.
"""
_USUAL_CONTEXT = 256
_LARGEST_WINDOW = 1024
"""Largest window or chunk that the prompt of the check exceeds: longer prompts take long to run."""

_WITHOUT_WINDOW = frozenset({"full_attention", "linear_attention"})
"""Types of layers, in configs, that see all tokens before them."""


def check_loaded(loaded: TransformersModel) -> None:
    """Compare the logits of a prepared model with those of the model itself.

    Logs at INFO if the model has a window that is too large for the prompts of the check.

    Raises:
        ConfigError: They differ by more than rounding.
        TargetError: The logits of the model depend on later tokens.
    """
    from graphkit.testing import check_wrapper

    is_quantised = getattr(loaded.model, "hf_quantizer", None) is not None
    is_wide = loaded.model.dtype.itemsize > 2
    name, context = type(loaded.model).__name__, _context_len(loaded)
    try:
        record = check_wrapper(
            loaded.target(max_batch_size=2, max_context_len=context),
            device=loaded.device.type,
            tolerance=_QUANTISED_TOLERANCE if is_quantised and is_wide else 1.0,
        )
    except AssertionError as error:
        raise ConfigError(
            f"{name} computes other logits through graphkit: {error}", field="folder_or_model"
        ) from error
    left = [each for each in _windows(loaded).items() if each[1] >= record.prompt_length]
    if left:
        longest = max(size for _, size in left) + BEYOND_WINDOW + _num_nodes(loaded)
        logger.info(
            "the check of %s at load does not test %s: its prompts have at most %d tokens. To test "
            "it, call graphkit.testing.check_wrapper(model.target(max_context_len=%d)).",
            name, " and ".join(f"{each} {size}" for each, size in left), record.prompt_length,
            min(longest, loaded.longest_context or longest),
        )  # fmt: skip


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
