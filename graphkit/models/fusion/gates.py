"""Gated feed-forward networks of any class, whose first product applies the gate."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from graphkit.models.fusion.agreement import agree, random_rows
from graphkit.models.fusion.linears import MergedLinears
from graphkit.models.fusion.observation import ModuleCall
from graphkit.models.quantization import QuantizedLinear

Project = Callable[..., torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class GatedNetwork:
    """A network ``down(silu(gate(rows)) * up(rows))``.

    Attributes:
        gate_up: Projects to the columns of the gate, then as many of the up projection, gated on
            request.
        down: The projection behind the product.
    """

    gate_up: Project
    down: nn.Module

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Run the network over rows, [..., H]."""
        out: torch.Tensor = self.down(self.gate_up(hidden_states, swiglu=True))
        return out


def find_gated_networks(
    root: ModuleCall,
    linears: Collection[nn.Module],
    merged: Mapping[nn.Module, MergedLinears],
) -> dict[nn.Module, GatedNetwork]:
    """Return the called modules that are gated networks.

    Args:
        root: The observed forward.
        linears: Modules that are linear layers.
        merged: Those that are merged, with their groups.
    """
    networks = {
        module: _gated_network(call, linears, merged) for module, call in root.by_module().items()
    }
    return {module: network for module, network in networks.items() if network is not None}


def _gated_network(
    call: ModuleCall,
    linears: Collection[nn.Module],
    merged: Mapping[nn.Module, MergedLinears],
) -> GatedNetwork | None:
    rows = call.only_input()
    used = [inner for inner in call.calls if inner.module in linears]
    if rows is None or not 2 <= len(used) <= 3 or "forward" in vars(call.module):
        return None
    down, readers = used[-1].module, [inner for inner in used if inner.only_input() is rows]
    first = used[0].module
    if not isinstance(first, nn.Linear | QuantizedLinear):
        return None
    gate_up: Project = merged.get(first, first)
    layers = gate_up.layers if isinstance(gate_up, MergedLinears) else (first,)
    widths = {len(layer.weight) for layer in layers}  # type: ignore[arg-type]
    if [inner.module for inner in readers] != list(layers) or len(used) != len(layers) + 1:
        return None
    if len(widths) > 1 or sum(len(layer.weight) for layer in layers) % 2:  # type: ignore[arg-type,misc]
        return None
    network, sample = GatedNetwork(gate_up, down), random_rows(rows, seed=0)
    try:
        got = network(sample)
    except RuntimeError:  # the products have other shapes
        return None
    return network if agree(call.module.forward(sample), got) else None
