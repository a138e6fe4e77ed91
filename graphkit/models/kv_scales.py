"""Scales of keys and values that a folder stores for caches of eight bits."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from transformers import PreTrainedModel

from graphkit.distributed import RankGroup
from graphkit.errors import CheckpointError
from graphkit.models.folder import StoredWeights, abbreviate
from graphkit.models.layout import AttentionLayer, ModelLayout
from graphkit.models.stored_tensors import scale_place, targets

logger = logging.getLogger(__name__)
_BLOCK = re.compile(r".+?\.\d+(?=\.|$)")

KVScales = dict[str, dict[str, tuple[float, ...]]]
"""Scales of all heads, or of each, by the name of the attention and then by ``k`` and ``v``."""


def read_kv_scales(
    model: PreTrainedModel, stored: StoredWeights, settings: Mapping[str, Any]
) -> KVScales:
    """Return the scales in a folder for keys and values in FP8.

    Args:
        model: The model.
        stored: The tensors of the folder.
        settings: ``quantization_config`` of the folder.

    Raises:
        CheckpointError: A scale is not positive and finite.
    """
    state = model.state_dict()
    names = [name for name in stored.forms if scale_place(name) and name not in state]
    placed = {name: target.name for name, target in targets(model, names).items()}
    scheme = settings.get("kv_cache_scheme") or {}
    algorithm = settings.get("kv_cache_quant_algo") or "FP8"
    is_fp8 = not isinstance(scheme, Mapping) or (
        scheme.get("type", "float") == "float" and scheme.get("num_bits", 8) == 8
    )
    if names and not (is_fp8 and algorithm == "FP8"):
        logger.info(
            "%s are scales of keys and values in another format than FP8: they are not used.",
            abbreviate(names),
        )
        return {}
    scales = KVScales()
    for name in names:
        tensor = stored.tensor(name).float().flatten()
        if not bool(((tensor > 0) & tensor.isfinite()).all()):
            raise CheckpointError(
                f"{name} is {tensor.tolist()[:8]}, expected positive numbers. Calibrate the scales "
                "of keys and values again, or remove these tensors."
            )
        place = scale_place(placed[name])
        assert place is not None, "renamings keep the end of a name"
        path, kinds = place
        scales.setdefault(path, {}).update(dict.fromkeys(kinds, tuple(tensor.tolist())))
    return scales


def with_kv_scales(
    layout: ModelLayout,
    model: PreTrainedModel,
    scales: KVScales,
    group: RankGroup | None = None,
) -> ModelLayout:
    """Return a layout whose layers have their scales, for pools of float8_e4m3fn.

    Args:
        layout: The layers, with the heads of this rank.
        model: The model.
        scales: The scales of all heads.
        group: Ranks that split the model.

    Raises:
        CheckpointError: A scale belongs to no attention of the model, or not to its heads.
    """
    if not scales:
        return layout
    prefix = f"{model.base_model_prefix}."
    names = {name: layer for layer in layout.attention for name in _names(layer, prefix)}
    modules = {name.removeprefix(prefix) for name, _ in model.named_modules()}
    if group is not None:
        scales = {
            path: {kind: _of_rank(s, names.get(path), group) for kind, s in by_kind.items()}
            for path, by_kind in scales.items()
        }
    for path, by_kind in scales.items():
        layer = names.get(path)
        block = _BLOCK.match(path)  # those of MTP layers and of other parts are in no block
        if layer is None and (block is None or block[0].removeprefix(prefix) in modules):
            raise CheckpointError(
                f"the folder has scales of keys and values of {path}, which does not attend. "
                "Correct the names, or remove the tensors."
            )
        for numbers in by_kind.values():
            if layer is not None and len(numbers) not in (1, layer.heads):
                raise CheckpointError(
                    f"the folder has {len(numbers)} scales of keys or values of {path}, expected "
                    f"one, or one of each of the {layer.heads} heads. Correct config.json."
                )
    latent = [layer.name for layer in layout.attention if layer.latent is not None]
    logger.info(
        "the folder has scales of keys and values, which pools of float8_e4m3fn (kv_dtype) use%s.",
        f", but not for latents ({abbreviate(latent)})" if latent else "",
    )
    return replace(
        layout, attention=tuple(_scaled(layer, scales, prefix) for layer in layout.attention)
    )


def _of_rank(
    scales: tuple[float, ...], layer: AttentionLayer | None, group: RankGroup
) -> tuple[float, ...]:
    """Return the scales of this rank's heads, if there is one of each head."""
    if layer is None or len(scales) == 1 or len(scales) != layer.heads * group.size:
        return scales
    return scales[layer.heads * group.rank : layer.heads * (group.rank + 1)]


def _names(layer: AttentionLayer, prefix: str) -> tuple[str, ...]:
    """Return the names under which scales of a layer may be stored."""
    name = layer.name.removesuffix(".attn")
    return layer.name, name, layer.name.removeprefix(prefix), name.removeprefix(prefix)


def _scaled(layer: AttentionLayer, scales: KVScales, prefix: str) -> AttentionLayer:
    own = [scales[name] for name in _names(layer, prefix) if name in scales]
    if not own or layer.latent is not None:
        return layer
    return replace(layer, key_scale=own[0].get("k", ()), value_scale=own[0].get("v", ()))
