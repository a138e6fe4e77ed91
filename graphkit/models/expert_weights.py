"""Experts that a folder has in eight or four bits, and that are held so.

A folder stores the matrices of experts one by one, and transformers stacks them, those of the gate
over those of the up projection; or it stores them as one tensor.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn
from transformers import PreTrainedModel

from graphkit.models.plain_tensors import PlainTensors, checked_rows
from graphkit.models.quantization.formulas import stored_rows
from graphkit.models.quantization.linear import (
    QuantizedExperts,
    is_weight_of_experts,
    replace_weight,
)
from graphkit.models.quantization.weight import QuantizedWeight
from graphkit.models.stored_tensors import Target
from graphkit.models.tensor_parallel import Part

StoredRows = dict[str, tuple[torch.Tensor, torch.Tensor]]
"""Outputs of quantised layers by name, [R], and what the folder stores of them, [R, K] float32. The
name of an expert is that of the weight, and its number."""


@dataclass(frozen=True, slots=True, eq=False)
class ExpertWeights:
    """The quantised experts of a folder.

    Attributes:
        weights: By parameter of the model.
        names: Their stored tensors, those of numbers.
        checked: Rows of the first and of the last expert of each weight.
    """

    weights: dict[str, QuantizedExperts] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)
    checked: StoredRows = field(default_factory=dict)

    def leave_out(self, model: nn.Module) -> None:
        """Let the parameters of a model have no numbers, in place, before it gets memory.

        They remain, because models initialise what transformers finds no tensor for.
        """
        for path in self.weights:
            owner, _, name = path.rpartition(".")
            setattr(model.get_submodule(owner), name, nn.Parameter(torch.empty(0)))

    def install(self, model: nn.Module) -> None:
        """Put the weights in the place of the parameters, in place."""
        for path, weight in self.weights.items():
            owner, _, name = path.rpartition(".")
            replace_weight(model.get_submodule(owner), name, weight)


def read_experts(
    model: PreTrainedModel,
    tensors: PlainTensors,
    placed: Mapping[str, Target],
    parts: Mapping[str, Part],
    device: torch.device,
) -> ExpertWeights:
    """Return the quantised experts that ``models.experts`` runs as they are stored.

    Those with other scales than ``expert_linear`` has are left out, and so are those whose numbers
    are not the whole parameter, for which the load of the others finds the reason.
    """
    read, names = ExpertWeights(), dict[str, list[str]]()
    for name in tensors.quantized:
        target = placed[name]
        if target.is_stacked or not target.is_converted:
            names.setdefault(target.name, []).append(name)
    shapes = {name: each.shape for name, each in model.named_parameters()}
    for path, stored in names.items():
        owner, _, leaf = path.rpartition(".")
        if path not in shapes or not is_weight_of_experts(model.get_submodule(owner), leaf):
            continue
        weights = _weights(tensors, placed, parts, stored, device)
        if not weights or not _are_whole(weights, shapes[path], parts.keys() & {*stored}):
            continue
        read.weights[path] = QuantizedExperts(weights)
        read.names.update(stored)
        if not parts.keys() & {*stored}:
            for expert in {0, len(weights) - 1}:
                read.checked[f"{path}.{expert}"] = _checked(tensors, placed, stored, expert)
    return read


def _weights(
    tensors: PlainTensors,
    placed: Mapping[str, Target],
    parts: Mapping[str, Part],
    names: list[str],
    device: torch.device,
) -> list[QuantizedWeight] | None:
    """Return the weight of each expert; ``None`` if one cannot be held."""
    if not placed[names[0]].is_stacked:
        whole = len(names) == 1 and names[0] not in parts
        return tensors.expert_weights(names[0], device) if whole else None
    weights: list[QuantizedWeight] = []
    for sources in zip(*_by_source(placed, names), strict=False):
        own = [tensors.weight(name, device, parts.get(name)) for name in sources]
        held = [each for each in own if each is not None]
        if len(held) < len(own) or len({each.kind for each in held}) > 1:
            return None
        weights.append(held[0] if len(held) == 1 else QuantizedWeight.join(held))
    return weights


def _by_source(placed: Mapping[str, Target], names: list[str]) -> list[list[str]]:
    """Return the stored names of each matrix of an expert, such as the gate, by expert."""
    sources: dict[int, list[str]] = {}
    for name in sorted(names, key=lambda name: [*map(int, re.findall(r"\d+", name))]):
        sources.setdefault(placed[name].source, []).append(name)
    return [sources[source] for source in sorted(sources)]


def _are_whole(weights: list[QuantizedWeight], shape: torch.Size, cut: object) -> bool:
    """Return whether weights are all of a parameter, of which a rank may have a part."""
    first = weights[0]
    expected = first.out_features, first.in_features, first.scale.shape
    are_alike = all((w.out_features, w.in_features, w.scale.shape) == expected for w in weights)
    is_whole = bool(cut) or expected[:2] == tuple(shape[1:])
    return are_alike and is_whole and len(weights) == shape[0]


def _checked(
    tensors: PlainTensors, placed: Mapping[str, Target], names: list[str], expert: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return outputs of an expert, and what the folder stores of them."""
    assert tensors.layout is not None, "it has quantised layers"
    method, outputs, numbers, end = tensors.layout.method, [], [], 0
    if placed[names[0]].is_stacked:
        own = [source[expert] for source in _by_source(placed, names)]
        matrices = [tensors.stored(name) for name in own]
        sizes = [tensors.forms[name][0][0] for name in own]
    else:
        matrices = [{s: tensor[expert] for s, tensor in tensors.stored(names[0]).items()}]
        sizes = [tensors.forms[names[0]][0][1]]
    for matrix, size in zip(matrices, sizes, strict=True):
        rows = checked_rows(size)
        outputs.append(rows + end)
        numbers.append(stored_rows(method, matrix, rows))
        end += size
    return torch.cat(outputs), torch.cat(numbers)
