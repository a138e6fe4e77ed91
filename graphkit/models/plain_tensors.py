"""Tensors of a quantised folder as those of the plain folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from graphkit.errors import CheckpointError
from graphkit.models.folder import StoredWeights
from graphkit.models.quantization import QuantizedWeight, StoredLayout
from graphkit.models.quantization.formulas import stored_rows
from graphkit.models.weight_files import Form

_CHECKED_ROWS = 8
"""Outputs of each quantised layer that the check at load compares."""
_TOLERANCE = 1e-4
"""Largest difference of dequantised float32 numbers, over the largest of them."""


class PlainTensors(StoredWeights):
    """The tensors of a folder, quantised layers dequantised, under the names of the plain folder.

    Args:
        folder: The folder.
        layout: Layout of the quantised layers; ``None`` if it has none.

    Attributes:
        forms: Shape and dtype of each tensor; dequantised ones are F32.
        quantized: Quantised layers by the name of their weight: their own name, and the stored
            names of their tensors by suffix.
    """

    def __init__(self, folder: Path, layout: StoredLayout | None) -> None:
        super().__init__(folder)
        self.layout = layout
        self.quantized: dict[str, tuple[str, dict[str, str]]] = {}
        layers = {} if layout is None else layout.layers(self.forms)
        forms: dict[str, Form] = {}
        for path, names in layers.items():
            assert layout is not None, "it has layers"
            name = path if names[layout.numbers] == path else f"{path}.weight"
            self.quantized[name] = path, names
            forms[name] = layout.shape(names, self.forms), "F32"
        parts = {part for names in layers.values() for part in names.values()}
        plain = {name: form for name, form in self.forms.items() if name not in parts}
        self.forms = plain | forms

    def stored(self, name: str, device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
        """Return the stored tensors of a quantised layer by suffix; ``name`` is its weight."""
        names = self.quantized[name][1]
        return {
            suffix: super(PlainTensors, self).tensor(n).to(device) for suffix, n in names.items()
        }

    def weight(self, name: str, device: torch.device | str = "cpu") -> QuantizedWeight:
        """Return the weight of a quantised layer."""
        assert self.layout is not None, "it has quantised layers"
        return self.layout.weight(self.quantized[name][0], self.stored(name, device))

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor on the CPU; dequantised ones are float32.

        Raises:
            CheckpointError: Tensors of a quantised layer are missing or do not fit, or the result
                is not what the formula of the layout gives.
        """
        if name not in self.quantized:
            return super().tensor(name)
        assert self.layout is not None, "it has quantised layers"
        tensors = self.stored(name)
        if len(self.forms[name][0]) == 3:
            weight = self.layout.experts(name, tensors)
            last = {suffix: tensor[-1] for suffix, tensor in tensors.items()}
            self._check(name, weight[-1], last)
        else:
            path, _ = self.quantized[name]
            weight = self.layout.weight(path, tensors).dequantized(torch.float32)
            self._check(name, weight, tensors)
        return weight

    def _check(self, name: str, weight: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> None:
        """Compare a dequantised matrix with the formula of the layout.

        Raises:
            CheckpointError: They differ.
        """
        assert self.layout is not None, "it has quantised layers"
        rows = checked_rows(len(weight))
        expected = stored_rows(self.layout.method, tensors, rows)
        if not bool((weight[rows] - expected).abs().max() <= _TOLERANCE * expected.abs().max()):
            raise CheckpointError(
                f"{name} is not what the tensors of {self.layout.method} stand for. Report this "
                "with the config.json of the folder."
            )


def checked_rows(outputs: int) -> torch.Tensor:
    """Return the outputs of a layer that are compared at load, with the first and the last."""
    return torch.linspace(0, outputs - 1, min(outputs, _CHECKED_ROWS)).long()
