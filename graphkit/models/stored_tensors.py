"""Where stored tensors go, and the account of a folder: each is used, without effect, or refused.

transformers renames stored tensors, and merges or splits some, when it loads a folder. Checked with
5.17 to 5.24.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)

from graphkit.errors import CheckpointError
from graphkit.models.folder import TEXT_PARTS, StoredWeights, abbreviate, read_config


class Target(NamedTuple):
    """Where a stored tensor goes.

    Attributes:
        name: Name in the state dict of the model; the first one if the tensor is split. The model
            may not have it.
        is_converted: Whether it is merged with others, split or transposed.
        is_stacked: Whether that is the stacking of matrices of experts, which may lie side by side
            in their first dimension before. The parameter then has one dimension more in front.
        source: Place of the tensor among those that are merged, such as gate and up projection.
    """

    name: str
    is_converted: bool
    is_stacked: bool
    source: int = 0


def targets(model: PreTrainedModel, names: Iterable[str]) -> dict[str, Target]:
    """Return where transformers puts stored tensors, by stored name."""
    mapping, state = get_model_conversion_mapping(model), model.state_dict()
    renamings = [step for step in mapping if isinstance(step, WeightRenaming)]
    converters = [step for step in mapping if isinstance(step, WeightConverter)]
    stacks = {
        pattern: place
        for converter in converters
        for place, pattern in enumerate(converter.source_patterns)
        if any(isinstance(step, MergeModulelist) for step in converter.operations)
        and all(isinstance(step, MergeModulelist | Concatenate) for step in converter.operations)
    }
    placed = {}
    for name in names:
        prefix = model.base_model_prefix
        target, pattern = rename_source_key(name, renamings, converters, prefix, state)
        if target not in state and name in state:
            target, pattern = rename_source_key(name, [], [], prefix, state)
        source = 0 if pattern is None else stacks.get(pattern, 0)
        placed[name] = Target(target, pattern is not None, pattern in stacks, source)
    return placed


logger = logging.getLogger(__name__)
_LAYER = re.compile(r"(.+?)\.(\d+)\.")
_OF_FOLDER = "transformers_modules."
"""Begins the modules that transformers imports from folders: their code says what is used."""
_FLOATS = ("F64", "F32", "F16", "BF16")
_WITHOUT_EFFECT = re.compile(
    r"(rotary_emb|rope)\.(inv_freq|original_inv_freq|cos_cached|sin_cached)$"  # from the settings
    r"|(^|\.)position_ids$|\.attn\.masked_bias$|\.attention\.masked_bias$|num_batches_tracked$"
    r"|(^|\.)(v_head|value_head|pooler|seq_relationship)\."  # beside the output head
    r"|(^|\.)mtp"  # layers that draft
)
"""Tensors that the settings of the model imply, or that no logit depends on."""
_ACTIVATIONS = re.compile(
    r"\.(input_scale(_ub)?|activation_scale|input_zero_point|input_observer\..*|output_scale"
    r"|[qp]_scale|prob_scale)$"
)
"""Tensors of quantised layers for activations of fewer bits, which graphkit does not round."""
_SCALE = re.compile(
    r"(?P<path>.+?)(\.attn)?(\.(k|v|kv|qkv|qkqkv)_proj)?\.(?P<kind>k|v|kv)(_cache)?_scale$"
    r"|(?P<module>.+?)\.(?P<output>k|v)_proj\.output_scale$"
)
"""Names of compressed-tensors, ModelOpt, Quark and AutoFP8, and those of vLLM."""
_ZERO_BY_DEFAULT = ("bias", "zero_point")
"""Ends of names of tensors that change nothing if they are zero."""


def check_stored(
    folder: Path,
    model: PreTrainedModel,
    report: Mapping[str, Any],
    stored: StoredWeights,
    *,
    is_quantised: bool = False,
    held: Collection[str] = (),
) -> None:
    """Compare the tensors of a folder with those that a loaded model has used.

    Logs at INFO what cannot change a text, and warns of layers that the settings leave out.

    Args:
        folder: The folder.
        model: The model.
        report: What transformers returned of its load (``output_loading_info``).
        stored: The tensors, as they were passed to transformers.
        is_quantised: Whether graphkit reads the quantised layers of the folder.
        held: Parameters without numbers, because graphkit holds them quantised.

    Raises:
        CheckpointError: A tensor is missing, has another shape, is not used, or has numbers whose
            scale is unknown.
    """
    for name, shape, expected in sorted(report["mismatched_keys"]):
        raise CheckpointError(
            f"{folder}: {name} has shape {list(shape)}, but config.json requires "
            f"{list(expected)}. Correct config.json."
        )
    placed = targets(model, stored.forms)
    stored_by_target = {target.name: name for name, target in placed.items()}
    unused = sorted({stored_by_target.get(name, name) for name in report["unexpected_keys"]})
    if missing := sorted({*report["missing_keys"]} - {*held}):
        raise _without(missing, unused, model, folder)
    state = model.state_dict()
    if getattr(model, "hf_quantizer", None) is None:
        for name, target in placed.items():
            is_float = target.name in state and state[target.name].is_floating_point()
            if is_float and stored.forms[name][1] not in _FLOATS:
                raise CheckpointError(
                    f"{folder}: {name} is stored as {stored.forms[name][1]}, and no "
                    "quantization_config in config.json or hf_quant_config.json says how to scale "
                    "its numbers. Add it as the folder was published, or use a folder of "
                    "unquantised weights."
                )
    config = read_config(folder)
    has_parts = config.get("is_encoder_decoder") or any(
        isinstance(part, Mapping) and "model_type" in part and name not in TEXT_PARTS
        for name, part in config.items()
    )
    if surplus := _surplus_layers(unused, model):
        logger.warning(
            "%s has weights of %s, which the model of its config.json does not have: they are "
            "ignored. Correct the number of layers in config.json if they belong to the model.",
            folder, abbreviate(surplus),
        )  # fmt: skip
    of_surplus = tuple(f"{layer}." for layer in surplus)

    def is_left(name: str) -> bool:
        return not name.startswith(of_surplus) and scale_place(name) is None

    left = [*filter(is_left, unused)]
    without_effect = [
        name
        for name in left
        if _has_no_effect(name, left, stored, is_quantised)
        or (has_parts and _is_of_other_part(name, model))
    ]
    refused = sorted({*left} - {*without_effect})
    if refused and type(model).__module__.startswith(_OF_FOLDER):
        logger.info("the code in %s does not use %s.", folder, abbreviate(refused))
    elif refused:
        raise CheckpointError(
            f"{folder} has {abbreviate(refused)}, which {type(model).__name__} with its "
            "config.json does not use: its text would be another one. Correct config.json (such as "
            "attention_bias or quantization_config), merge adapters into the weights, or remove "
            "the tensors if they are not part of the model."
        )
    not_in_model = (name for name, target in placed.items() if target.name not in state)
    if ignored := sorted({*without_effect, *filter(is_left, not_in_model)}):
        logger.info("%s has %s, which the text does not depend on.", folder, abbreviate(ignored))


def scale_place(name: str) -> tuple[str, str] | None:
    """Return the attention of a stored scale, and ``k``, ``v`` or ``kv``; ``None`` for others."""
    match = _SCALE.fullmatch(name)
    if match is None:
        return None
    return match["path"] or match["module"], match["kind"] or match["output"]


def is_of_rounding(name: str) -> bool:
    """Return whether a tensor of a quantised folder is a scale of activations, keys or values.

    graphkit rounds no activations. Pools take the scales of keys and values; see ``kv_scales``.
    """
    return bool(_ACTIVATIONS.search(name)) or scale_place(name) is not None


def _has_no_effect(
    name: str,
    unused: Collection[str],
    stored: StoredWeights,
    is_quantised: bool,
) -> bool:
    """Return whether the text of a model does not depend on a tensor that it does not have."""
    if _WITHOUT_EFFECT.search(name) or (is_quantised and _ACTIVATIONS.search(name)):
        return True
    place = _LAYER.match(name)
    if place is not None and f"{place[0]}eh_proj.weight" in unused:
        return True  # of an MTP layer that is stored behind the others
    shape, _ = stored.forms.get(name, ([], ""))
    if name.endswith(("attn.bias", "attention.bias")) and len(shape) == 4:
        return True  # a causal mask, which older models of GPT-2's kind stored
    if name.endswith(_ZERO_BY_DEFAULT) and name in stored.forms:
        return not bool(stored.tensor(name).any())
    return False


def _is_of_other_part(name: str, model: PreTrainedModel) -> bool:
    """Return whether a tensor belongs to a part beside the language model, such as vision."""
    first = name.removeprefix(f"{model.base_model_prefix}.").partition(".")[0]
    base = getattr(model, model.base_model_prefix, model)
    own = {*dict(model.named_children()), *dict(base.named_children()), "language_model"}
    return first not in own and "lora" not in name


def _without(
    missing: list[str], unused: list[str], model: PreTrainedModel, folder: Path
) -> CheckpointError:
    """Return the error of a folder that lacks tensors of a model."""
    name = type(model).__name__
    stored = model.config.architectures or [name]
    if name in stored:
        text = f"{folder} has no {abbreviate(missing)}, which config.json requires"
        if unused:
            return CheckpointError(
                f"{text}, but has {abbreviate(unused)}, which {name} does not use: transformers "
                "has no conversion from one to the other. Use a folder with the names of its model."
            )
        return CheckpointError(f"{text}. Download all weights, or correct config.json.")
    return CheckpointError(
        f"{folder} holds a {stored[0]}, which lacks {abbreviate(missing)} of {name}. Pass the "
        "folder of a causal language model."
    )


def _surplus_layers(names: Collection[str], model: PreTrainedModel) -> list[str]:
    """Return the layers of unexpected tensors that continue a list of the model, without MTP."""
    modules = {name for name, _ in model.named_modules()}
    numbered = {tuple(place.groups()) for place in map(_LAYER.match, names) if place}
    layers = {f"{path}.{i}" for path, i in numbered if path in modules} - modules
    return sorted(layers - {name.partition(".eh_proj.")[0] for name in names})
