"""Root mean square norms of any class, computed by ``graphkit::rms_norm``."""

from __future__ import annotations

import torch
from torch import nn

from graphkit.hf.fusion.agreement import agree, random_rows
from graphkit.hf.fusion.observation import ModuleCall
from graphkit.hf.fusion.residual import normalised


class Norm:
    """A norm of rows.

    Args:
        module: The norm, which holds the weight.
        name: Name of the weight in the module, [H].
        eps: Added to the mean square.
        adds_one: Whether the factor of a column is its weight plus 1, in float32.
    """

    def __init__(self, module: nn.Module, name: str, eps: float, adds_one: bool) -> None:
        self.eps = eps
        self._module, self._name, self._adds_one = module, name, adds_one
        self._sum: tuple[object, torch.Tensor] | None = None

    @property
    def weight(self) -> torch.Tensor:
        """Factor of each column, [H], as the module has it now."""
        weight = self._module.get_parameter(self._name)
        if not self._adds_one:
            return weight
        if weight.is_inference():  # such tensors do not count their writes
            return weight.float() + 1
        state = id(weight), weight.data_ptr(), weight._version
        known = self._sum
        if known is None or known[0] != state:
            known = state, weight.float() + 1
            if not (weight.is_cuda and torch.cuda.is_current_stream_capturing()):
                self._sum = known  # other graphs must not read what one graph computes
        return known[1]

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
    weights = list(module.named_parameters())
    if rows is None or call.calls or "forward" in vars(module) or len(weights) != 1:
        return None
    ((name, weight),) = weights
    if not rows.is_floating_point() or weight.shape != rows.shape[-1:] or rows.dim() < 2:
        return None
    sample = random_rows(rows, seed=0)
    expected = module.forward(sample)
    numbers = {value for value in vars(module).values() if isinstance(value, float)}
    for eps in sorted(number for number in numbers if number >= 0):
        for adds_one in (False, True):
            norm = Norm(module, name, eps, adds_one)
            if agree(expected, norm(sample)):
                return norm
    return None
