"""Checks of a loaded model: its logits against those of transformers, and settings without use.

transformers keeps a setting that it does not know, such as one of a later version or a misspelt
one, and computes without it.
"""

from __future__ import annotations

import inspect
import logging
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import transformers
from transformers import PreTrainedModel

from graphkit.errors import CheckpointError, ConfigError, short_repr
from graphkit.models.folder import TEXT_PARTS, read_config
from graphkit.models.model import TransformersModel
from graphkit.models.wrapper.comparison import check_wrapper
from graphkit.models.wrapper.text_batches import BEYOND_WINDOW, window_settings
from graphkit.spec import ForwardMode

logger = logging.getLogger(__name__)
_ROTATION = ("rope_scaling", "rope_parameters", "rope_theta")
_OFF: tuple[object, ...] = (None, False, 0, "", [], {})
_CHANGES_TEXT: Mapping[str, tuple[object, ...]] = dict.fromkeys((
    "alibi", "attention_chunk_size", "attn_logit_softcapping", "attn_temperature_tuning",
    "clip_qkv", "final_logit_softcapping", "logit_softcapping", "logits_soft_cap",
    "no_rope_layers", "qk_layernorm", "qk_norm", "query_pre_attn_scalar", "rope_interleave",
    "rope_scaling", "rope_parameters", "scale_embedding", "sliding_window", "use_qk_norm",
    "use_sinks", "yarn",
), ()) | {
    "attention_multiplier": (1,), "embedding_multiplier": (1,), "is_causal": (True,),
    "logit_scale": (1,), "logits_scaling": (1,), "mup_width_multiplier": (1,),
    "partial_rotary_factor": (1,), "residual_multiplier": (1,), "rotary_pct": (1,),
    "scale_emb": (1,), "layer_types": (),
}  # fmt: skip
"""Settings that change the text of every model that reads them, with values that do not."""


def check_keys(folder: Path, model: PreTrainedModel) -> None:
    """Compare the settings of a folder with those that the code of its model reads.

    Logs the names of unread settings at INFO.

    Raises:
        CheckpointError: One of them would change the text if it was read.
    """
    own, general = _source(model)
    if not own:
        return
    data = read_config(folder)
    parts = [data, *(part for name in TEXT_PARTS if isinstance(part := data.get(name), Mapping))]
    text = model.config.get_text_config(decoder=True)
    longest, unread = getattr(text, "max_position_embeddings", None), []
    for name, value in (item for part in parts for item in part.items()):
        if name.startswith("_"):
            continue
        if _reads(own, name):
            for key, setting in _rotation_settings(name, value):
                is_read = re.search(rf"[\"']{re.escape(key)}[\"']", general)
                if not (is_read or (setting is not True and setting in (*_OFF, 1))):
                    raise _unread_setting(folder, model, f"{name}.{key}", setting)
            continue
        if name in _CHANGES_TEXT and not _is_off(name, value, data, longest):
            raise _unread_setting(folder, model, name, value)
        if not _reads(general, name):
            unread.append(name)
    if unread:
        names = ", ".join(dict.fromkeys(unread))
        logger.info("config.json of %s has %s, which its model does not read.", folder, names)


def _unread_setting(
    folder: Path, model: PreTrainedModel, name: str, value: object
) -> CheckpointError:
    return CheckpointError(
        f"config.json of {folder} sets {name} to {short_repr(value)}, which {type(model).__name__} "
        f"of transformers {transformers.__version__} does not read: its text would be that of "
        "another model. Correct model_type or the name, update transformers, or remove "
        f"{name} if the model was trained without it."
    )


def _rotation_settings(name: str, value: object) -> Iterator[tuple[str, object]]:
    """Yield the settings of a rotation, which may be grouped by type of layer.

    Without ``finetuned``, which says how a model was trained.
    """
    if name in _ROTATION and isinstance(value, Mapping):
        for key, setting in value.items():
            if isinstance(setting, Mapping):
                yield from _rotation_settings(name, setting)
            elif key != "finetuned":
                yield key, setting


def _is_off(name: str, value: object, data: Mapping[str, object], longest: object) -> bool:
    """Return whether a setting has a value that changes no text of so many tokens."""
    if value in (*_OFF, *_CHANGES_TEXT[name]):
        return True
    if name == "sliding_window":
        is_long = isinstance(value, int) and isinstance(longest, int) and value >= longest
        return is_long or data.get("use_sliding_window") is False
    if isinstance(value, Mapping):
        return bool(value.get("rope_type", value.get("type")) == "default")
    return isinstance(value, list) and set(map(str, value)) == {"full_attention"}


def _reads(source: str, name: str) -> bool:
    names = _ROTATION if name in _ROTATION else (name,)  # transformers converts one to the other
    return any(re.search(rf"\b{re.escape(spelling)}\b", source) for spelling in names)


def _source(model: PreTrainedModel) -> tuple[str, str]:
    """Return the code of a model and its configuration, and that of all models.

    Empty where the code cannot be read, as in a program that was compiled.
    """
    owners = {type(part) for part in (*model.modules(), model.config)}
    owners |= {type(getattr(model.config, name, None)) for name in model.config.sub_configs}
    modules = {cls.__module__ for owner in owners for cls in owner.__mro__}
    own: list[str] = []
    general: list[str] = []
    for name in sorted(modules):
        if not name.startswith(("torch.", "builtins", "graphkit.")):
            is_own = ".models." in name or not name.startswith("transformers.")
            (own if is_own else general).extend(_code(name))
    for name in ("configuration_utils", "modeling_rope_utils", "generation.configuration_utils"):
        general.extend(_code(f"transformers.{name}"))
    return "\n".join(own), "\n".join([*own, *general])


def _code(name: str) -> Iterator[str]:
    try:
        yield inspect.getsource(sys.modules[name])
    except (OSError, TypeError, KeyError):
        return


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
