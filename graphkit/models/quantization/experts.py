"""Quantised weights of the experts of a layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn

from graphkit.models.quantization.weight import QuantizedWeight
from graphkit.ops.experts import expert_linear

SUFFIXES = ("gate_up_proj", "up_proj", "down_proj")
"""Names of the weights of experts that ``models.experts`` runs."""


class QuantizedExperts(nn.Module):
    """The quantised weight of each expert, in the place of a parameter of a module of experts.

    Args:
        weights: The weight of each expert, all with scales of one shape.

    Attributes:
        weight: Numbers, [E, N, L]; see ``QuantizedWeight``.
        scale: [E, R, C].
        zero_point: [E, R, C] uint8; ``None`` for 8.
        in_features: Inputs (K).
    """

    weight: nn.Parameter
    scale: nn.Parameter
    zero_point: nn.Parameter | None

    def __init__(self, weights: Sequence[QuantizedWeight]) -> None:
        super().__init__()
        weights = [*_of_one_shape(weights)]
        self.in_features, self.out_features = weights[0].in_features, weights[0].out_features
        self.weight = _stacked([each.numbers for each in weights])
        self.scale = _stacked([each.scale for each in weights])
        zeros = [each.zero_point for each in weights if each.zero_point is not None]
        self.zero_point = _stacked(zeros) if zeros else None

    def __len__(self) -> int:
        """Return the number of experts (E)."""
        return len(self.weight)

    def of(self, expert: int) -> QuantizedWeight:
        """Return the weight of one expert, as views."""
        zero = None if self.zero_point is None else self.zero_point.data[expert]
        return QuantizedWeight(
            self.weight.data[expert], self.scale.data[expert], zero, self.in_features
        )

    def forward(self, rows: torch.Tensor, expert: int) -> torch.Tensor:
        """Multiply rows, [T, K] to [T, N], with the weight of one expert."""
        chosen = torch.full((len(rows), 1), expert, device=rows.device)
        return expert_linear(rows, chosen, self.weight, self.scale, self.zero_point)

    def extra_repr(self) -> str:
        """Describe the weights in the representation of their model."""
        bits = 4 if self.weight.dtype == torch.uint8 else 8
        return (
            f"experts={len(self)}, in_features={self.in_features}, "
            f"out_features={self.out_features}, bits={bits}, scales={list(self.scale.shape[1:])}"
        )


def is_weight_of_experts(owner: nn.Module, name: str) -> bool:
    """Return whether ``models.experts`` runs a parameter of a module, with an output per row."""
    return name in SUFFIXES and getattr(owner, "is_transposed", True) is False


def quantize_experts(
    module: nn.Module,
    quantize: Callable[[torch.Tensor], QuantizedWeight],
    device: torch.device | str | None,
) -> int:
    """Replace the weights of experts in a module, in place, by quantised ones.

    Args:
        module: The module.
        quantize: Quantises the weight of one expert.
        device: Where to quantise; ``None`` for the device of each weight.

    Returns:
        The number of quantised weights, each of all experts.
    """
    count = 0
    for owner in list(module.modules()):
        for name, weight in list(owner.named_parameters(recurse=False)):
            if is_weight_of_experts(owner, name):
                held = QuantizedExperts([quantize(each.to(device)) for each in weight.data])
                replace_weight(owner, name, held)
                count += 1
    return count


def replace_weight(owner: nn.Module, name: str, weight: QuantizedExperts) -> None:
    """Put quantised weights in the place of a parameter, in place."""
    delattr(owner, name)
    setattr(owner, name, weight)


def restore_experts(module: nn.Module, dtype: torch.dtype) -> None:
    """Replace the quantised experts in a module, in place, by empty parameters of a dtype."""
    for owner in list(module.modules()):
        for name, weight in list(owner.named_children()):
            if isinstance(weight, QuantizedExperts):
                shape = len(weight), weight.out_features, weight.in_features
                plain = torch.empty(shape, dtype=dtype, device=weight.weight.device)
                delattr(owner, name)
                owner.register_parameter(name, nn.Parameter(plain, requires_grad=False))


def _of_one_shape(weights: Sequence[QuantizedWeight]) -> Iterator[QuantizedWeight]:
    """Yield the weights with zero points for all of them or none."""
    has_zeros = any(each.zero_point is not None for each in weights)
    for each in weights:
        yield each.with_zero_points() if has_zeros else each


def _stacked(tensors: Sequence[torch.Tensor]) -> nn.Parameter:
    first = tensors[0]
    if first.itemsize > 1:
        return nn.Parameter(torch.stack([*tensors]), requires_grad=False)
    # Bytes, which every device can stack.
    stacked = torch.stack([each.view(torch.uint8) for each in tensors]).view(first.dtype)
    return nn.Parameter(stacked, requires_grad=False)
