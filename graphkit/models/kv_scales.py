"""Scales of keys and values that a folder stores for caches of eight bits."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from graphkit.distributed import RankGroup
from graphkit.errors import CheckpointError
from graphkit.models.folder import StoredWeights, abbreviate, read_quantized_config
from graphkit.models.layout import AttentionLayer, ModelLayout
from graphkit.models.quantization.settings import quantization_settings
from graphkit.models.stored_tensors import scale_place, targets

logger = logging.getLogger(__name__)
_BLOCK = re.compile(r".+?\.\d+(?=\.|$)")


def with_kv_scales(
    layout: ModelLayout, model: PreTrainedModel, folder: Path, group: RankGroup | None = None
) -> ModelLayout:
    """Return a layout whose layers have the scales of a folder, for pools of float8_e4m3fn.

    Raises:
        CheckpointError: A scale belongs to no attention of the model, or not to its heads, or is
            not positive and finite.
    """
    stored, state = StoredWeights(folder), model.state_dict()
    names = [name for name in stored.forms if scale_place(name) and name not in state]
    if not names:
        return layout
    if not _are_fp8(quantization_settings(read_quantized_config(folder)) or {}):
        logger.info(
            "%s are scales of keys and values in another format than FP8: they are not used.",
            abbreviate(names),
        )
        return layout
    prefix = f"{model.base_model_prefix}."
    modules = {name.removeprefix(prefix) for name, _ in model.named_modules()}

    def path_of(name: str) -> str:
        """Return the path of an attention, which folders store under several names."""
        return name.removesuffix(".attn").removeprefix(prefix)

    layers = {path_of(layer.name): layer for layer in layout.attention}
    scales: dict[str, dict[str, tuple[float, ...]]] = {}
    for name, target in targets(model, names).items():
        tensor, place = stored.tensor(name).float().flatten(), scale_place(target.name)
        assert place is not None, "renamings keep the end of a name"
        path, kinds = path_of(place[0]), place[1]
        if not bool(((tensor > 0) & tensor.isfinite()).all()):
            raise CheckpointError(
                f"{name} is {tensor.tolist()[:8]}, expected positive numbers. Calibrate the scales "
                "of keys and values again, or remove these tensors."
            )
        numbers, block = tuple(tensor.tolist()), _BLOCK.match(path)
        if path in layers:
            numbers = _of_rank(numbers, layers[path], group)
            if len(numbers) not in (1, layers[path].heads):
                raise CheckpointError(
                    f"the folder has {len(numbers)} scales of keys or values of {path}, expected "
                    f"one, or one of each of the {layers[path].heads} heads. Correct config.json."
                )
            scales.setdefault(path, {}).update(dict.fromkeys(kinds, numbers))
        elif block is None or block[0] in modules:  # those of MTP and other parts are in no block
            raise CheckpointError(
                f"the folder has scales of keys and values of {path}, which does not attend. "
                "Correct the names, or remove the tensors."
            )
    latent = [layer.name for layer in layout.attention if layer.latent is not None]
    logger.info(
        "the folder has scales of keys and values, which pools of float8_e4m3fn (kv_dtype) use%s.",
        f", but not for latents ({abbreviate(latent)})" if latent else "",
    )

    def scaled(layer: AttentionLayer) -> AttentionLayer:
        own = scales.get(path_of(layer.name))
        if own is None or layer.latent is not None:
            return layer
        return replace(layer, key_scale=own.get("k", ()), value_scale=own.get("v", ()))

    return replace(layout, attention=tuple(map(scaled, layout.attention)))


def _are_fp8(settings: Mapping[str, Any]) -> bool:
    """Return whether the scales of a folder are those of keys and values in FP8."""
    scheme = settings.get("kv_cache_scheme") or {}
    is_float = not isinstance(scheme, Mapping) or (
        scheme.get("type", "float") == "float" and scheme.get("num_bits", 8) == 8
    )
    return is_float and (settings.get("kv_cache_quant_algo") or "FP8") == "FP8"


def _of_rank(
    scales: tuple[float, ...], layer: AttentionLayer, group: RankGroup | None
) -> tuple[float, ...]:
    """Return the scales of this rank's heads, if there is one of each head."""
    if group is None or len(scales) == 1 or len(scales) != layer.heads * group.size:
        return scales
    return scales[layer.heads * group.rank : layer.heads * (group.rank + 1)]
