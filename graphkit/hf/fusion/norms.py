"""Root mean square norms of any class, computed by ``graphkit::rms_norm``."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from graphkit.hf.fusion.agreement import agree, random_rows
from graphkit.hf.fusion.observation import ModuleCall
from graphkit.hf.fusion.residual import normalised


@dataclass(frozen=True, slots=True, eq=False)
class Norm:
    """A norm of rows.

    Attributes:
        weight: Factor of each column, [H].
        eps: Added to the mean square.
    """

    weight: torch.Tensor
    eps: float

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Normalise rows, [..., H]."""
        return normalised(hidden_states, self.weight, self.eps)


def find_norms(root: ModuleCall) -> dict[nn.Module, Norm]:
    """Return the called modules that are root mean square norms."""
    found = {module: _norm(call) for module, call in root.by_module().items()}
    return {module: norm for module, norm in found.items() if norm is not None}


def _norm(call: ModuleCall) -> Norm | None:
    """Try the module's weight, as it is and with 1 added, with the small numbers that it holds."""
    module, rows = call.module, call.only_input()
    weights = list(module.parameters())
    if rows is None or call.calls or "forward" in vars(module) or len(weights) != 1:
        return None
    (weight,) = weights
    if not rows.is_floating_point() or weight.shape != rows.shape[-1:] or rows.dim() < 2:
        return None
    sample = random_rows(rows, seed=0)
    expected = module.forward(sample)
    numbers = {value for value in vars(module).values() if isinstance(value, float)}
    for eps in sorted(number for number in numbers if number >= 0):
        for factor in (weight, weight.float() + 1):
            norm = Norm(factor, eps)
            if agree(expected, norm(sample)):
                return norm
    return None
