"""Tensors of a quantised folder as those of the plain folder."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping
from copy import copy
from pathlib import Path
from types import MappingProxyType

import torch
from torch import nn

from graphkit.errors import CheckpointError
from graphkit.models.folder import (
    Form,
    StoredWeights,
    abbreviate,
    check_tensors,
    read_quantized_config,
)
from graphkit.models.quantization.formulas import stored_rows
from graphkit.models.quantization.linear import Linear, QuantizedLinear, keep_hooks
from graphkit.models.quantization.settings import quantization_settings
from graphkit.models.quantization.stored import (
    StoredLayout,
    quantized_fp8_experts,
    stored_layout,
    unpack_fp8_experts,
)
from graphkit.models.quantization.weight import QuantizedWeight
from graphkit.models.tensor_parallel import Part
from graphkit.ops.quantized_layout import BLOCK

logger = logging.getLogger(__name__)
_LINEAR = (nn.Linear.forward, Linear.forward)

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
        self.folder, self.layout, self._names = folder, layout, dict[str, str]()
        self._stored_forms = self.forms
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

    def renamed(self, names: Mapping[str, str]) -> PlainTensors:
        """Return some of the tensors under other names; ``names`` has the old name of each."""
        other = copy(self)
        other._names = dict(names)
        other.forms = {new: self.forms[old] for new, old in names.items()}
        kept = {new: self.quantized.get(old) for new, old in names.items()}
        other.quantized = {new: layer for new, layer in kept.items() if layer is not None}
        return other

    def stored(self, name: str, device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
        """Return the stored tensors of a quantised layer by suffix; ``name`` is its weight."""
        names = self.quantized[name][1]
        return {
            suffix: super(PlainTensors, self).tensor(n).to(device) for suffix, n in names.items()
        }

    def weight(
        self, name: str, device: torch.device | str = "cpu", part: Part | None = None
    ) -> QuantizedWeight | None:
        """Return the weight of a quantised layer, or a part of it; ``None`` if it cannot be cut."""
        assert self.layout is not None, "it has quantised layers"
        weight = self.layout.weight(self.quantized[name][0], self.stored(name, device))
        if part is None:
            return weight
        if len(part.spans) > 1 or part.padding:
            return None
        ((begin, end),) = part.spans
        if part.dim == -2:
            return weight.part(begin, end)
        if weight.scale.shape[1] > 1 and begin % BLOCK:
            return None
        return weight.input_part(begin, end)

    def expert_weights(
        self, name: str, device: torch.device | str = "cpu"
    ) -> list[QuantizedWeight] | None:
        """Return the weights of experts that are one tensor; ``None`` with scales of inputs."""
        assert self.layout is not None, "it has quantised layers"
        path, _ = self.quantized[name]
        return self.layout.unpacked(path, self.stored(name, device), quantized_fp8_experts)

    def fill(
        self,
        module: nn.Module,
        expected: Mapping[str, torch.Tensor],
        device: torch.device,
        parts: Mapping[str, Part] = MappingProxyType({}),
    ) -> None:
        """Copy the tensors into a module, with quantised layers in the place of linear ones.

        Warns of quantised weights that are no linear layers, or that ranks cannot cut.

        Args:
            module: Has memory for the tensors, dequantised.
            expected: Tensors by name with the shapes of the stored ones.
            device: Where the quantised weights go.
            parts: The part of a tensor that the module has, by name.

        Raises:
            CheckpointError: A tensor is missing or unexpected, or has the wrong shape or dtype.
        """
        check_tensors(self.forms, expected)
        state, layers = module.state_dict(), dict(module.named_modules(remove_duplicate=False))
        with torch.no_grad():
            for name in (name for name in self.forms if name in state):
                tensor = self.tensor(name)
                state[name].copy_(parts[name].of(tensor) if name in parts else tensor)
        dequantised = []
        for name in self.quantized:
            path = name.removesuffix(".weight")
            plain, weight = layers.get(path), None
            if isinstance(plain, nn.Linear) and type(plain).forward in _LINEAR:
                weight = self.weight(name, device, parts.get(name))
            if weight is None or not isinstance(plain, nn.Linear):
                dequantised.append(name)
                continue
            layer = QuantizedLinear(weight).train(plain.training)
            layer.bias = plain.bias
            keep_hooks(plain, layer)
            module.set_submodule(path, layer)
        if dequantised:
            self.warn_dequantised(dequantised, state[dequantised[0]].dtype)

    def warn_dequantised(self, names: list[str], dtype: torch.dtype) -> None:
        """Warn once that quantised weights are held in a dtype, with the bytes that this takes."""
        if not names:
            return
        stored = [self._stored_forms[part] for n in names for part in self.quantized[n][1].values()]
        held = sum(math.prod(self.forms[name][0]) for name in names) * dtype.itemsize
        logger.warning(
            "%s: %s are held in %s, which takes %.3f GB where the folder has %.3f GB: they are no "
            "linear layers but the output head, transformers merges or splits them, or ranks split "
            "their blocks.",
            self.folder, abbreviate(names), dtype, held / 1e9, sum(map(_bytes, stored)) / 1e9,
        )  # fmt: skip

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor on the CPU; dequantised ones are float32.

        Raises:
            CheckpointError: Tensors of a quantised layer are missing or do not fit, or the result
                is not what the formula of the layout gives.
        """
        if name not in self.quantized:
            return super().tensor(self._names.get(name, name))
        assert self.layout is not None, "it has quantised layers"
        tensors = self.stored(name)
        if len(self.forms[name][0]) == 3:
            weight = self.layout.unpacked(name, tensors, unpack_fp8_experts)
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


def plain_tensors(folder: Path) -> PlainTensors:
    """Return the tensors of a folder.

    Raises:
        CheckpointError: A file is missing or damaged, or has layers in a layout that graphkit does
            not read.
    """
    config = read_quantized_config(folder)
    layout, settings = stored_layout(config), quantization_settings(config)
    if layout is None and settings:
        raise CheckpointError(
            f"{folder} has quantised layers of the method {settings.get('quant_method')!r}, which "
            "graphkit does not read. Use a folder in a layout of the page Quantised weights."
        )
    return PlainTensors(folder, layout)


def _bytes(form: Form) -> int:
    shape, dtype = form
    bits = re.search(r"\d+", dtype)
    return math.prod(shape) * (int(bits[0]) // 8 if bits else 1)


def checked_rows(outputs: int) -> torch.Tensor:
    """Return the outputs of a layer that are compared at load, with the first and the last."""
    return torch.linspace(0, outputs - 1, min(outputs, _CHECKED_ROWS)).long()
