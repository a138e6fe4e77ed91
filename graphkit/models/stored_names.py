"""Names and conversions of stored tensors, as transformers has them for each type of model.

transformers renames stored tensors, and merges or splits some, when it loads a folder. Checked with
5.17 to 5.24.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)


class Target(NamedTuple):
    """Where a stored tensor goes.

    Attributes:
        name: Name in the state dict of the model; the first one if the tensor is split. The model
            may not have it.
        is_converted: Whether it is merged with others, split or transposed.
        is_stacked: Whether that is the stacking of matrices of experts, which may lie side by side
            in their first dimension before. The parameter then has one dimension more in front.
    """

    name: str
    is_converted: bool
    is_stacked: bool


def targets(model: PreTrainedModel, names: Iterable[str]) -> dict[str, Target]:
    """Return where transformers puts stored tensors, by stored name.

    Args:
        model: The model, which may be on the meta device.
        names: Names of the stored tensors.
    """
    mapping, state = get_model_conversion_mapping(model), model.state_dict()
    renamings = [step for step in mapping if isinstance(step, WeightRenaming)]
    converters = [step for step in mapping if isinstance(step, WeightConverter)]
    stacks = {
        pattern
        for converter in converters
        for pattern in converter.source_patterns
        if any(isinstance(step, MergeModulelist) for step in converter.operations)
        and all(isinstance(step, MergeModulelist | Concatenate) for step in converter.operations)
    }
    placed = {}
    for name in names:
        prefix = model.base_model_prefix
        target, pattern = rename_source_key(name, renamings, converters, prefix, state)
        if target not in state and name in state:
            target, pattern = rename_source_key(name, [], [], prefix, state)
        placed[name] = Target(target, pattern is not None, pattern in stacks)
    return placed
