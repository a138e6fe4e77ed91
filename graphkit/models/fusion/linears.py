"""Linear layers of one input as one product, over weights that are held once."""

from __future__ import annotations

import ctypes
import mmap
import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear

from graphkit.models.fusion.observation import ModuleCall, agree, random_rows
from graphkit.models.quantization.linear import (
    QuantizedLinear,
    is_row_invariant,
    merge_quantized,
    project_quantized,
)
from graphkit.models.quantization.weight import QuantizedWeight, join_rows
from graphkit.models.running import replaced_forwards, running_products
from graphkit.models.tensor_parallel import gathers_columns
from graphkit.ops.linear import project

_PAGEOUT = 21
"""``MADV_PAGEOUT`` of ``<asm-generic/mman-common.h>``, which Python 3.11 does not name."""

_SLOW = (
    "linear layers that run as one product were given weights of their own after the load. Results "
    "are right, but each product copies these weights first."
)


class MergedLinears:
    """Linear layers of one input, whose weights are rows of one tensor.

    The parameters remain those of the layers, as views of the merged tensors, and no other tensor
    holds them: each product reads them as they are then. Parameters that were replaced, and so no
    longer lie side by side, are joined for each product, with a warning.

    During a forward of graphkit, the layer that runs first computes the product of all, and each
    other one returns its columns of it if neither input nor weights have changed. The products
    belong to the running forward and end with it. Elsewhere each layer computes its own.

    Args:
        layers: The layers, in the order of their columns.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self.layers = tuple(layers)
        self.sizes = [len(layer.weight) for layer in layers]  # type: ignore[arg-type]
        self._quantized = [layer for layer in layers if isinstance(layer, QuantizedLinear)]
        if self._quantized:
            merge_quantized(self._quantized)
        else:
            _merge([layer.weight for layer in layers])  # type: ignore[misc]
            _merge(_biases(layers))
        self._forwards = [layer.forward for layer in layers]
        for index, layer in enumerate(layers):
            layer.forward = partial(self._columns_of_layer, index)

    def __call__(self, rows: torch.Tensor, **result: bool) -> torch.Tensor:
        """Return the columns of all layers side by side, [..., C]; see ``project``."""
        whole: torch.Tensor = self.layers[0](rows, whole=result)  # a module, so that hooks see it
        return whole

    def _columns_of_layer(
        self,
        index: int,
        input: torch.Tensor,  # noqa: A002 - the name in nn.Linear
        whole: Mapping[str, bool] | None = None,
    ) -> torch.Tensor:
        if whole is not None:
            return self._product(input, **whole)
        products, terms = running_products(), (input, *self._parameters())
        # Inference tensors do not count their writes.
        if products is None or any(term.is_inference() for term in terms):
            columns: torch.Tensor = self._forwards[index](input)
            return columns
        state = [(id(term), term.data_ptr(), term._version) for term in terms]
        _, known, parts = products.get(self, (None, None, {}))
        if known != state or index not in parts:
            parts = dict(enumerate(self._product(input).split(self.sizes, -1)))
            products[self] = terms, state, parts  # the terms, so that no other gets their ids
        columns = parts.pop(index)
        if not parts:
            del products[self]
        return columns

    def _product(self, rows: torch.Tensor, **result: bool) -> torch.Tensor:
        first: torch.Tensor = self.layers[0].weight  # type: ignore[assignment]
        weight, product = _joint_product(self.layers, rows, **result)
        if weight.data_ptr() != first.data_ptr():
            warnings.warn(
                f"{_SLOW} Load the model again, or write new weights into the old ones (copy_).",
                stacklevel=2,
            )
        return product

    def _parameters(self) -> list[torch.Tensor]:
        return [tensor for layer in self.layers for tensor in layer.parameters(recurse=False)]


def project_merged(layers: Sequence[nn.Module], rows: torch.Tensor) -> torch.Tensor:
    """Return the columns of linear layers side by side, [..., C], as one product.

    No copy is made of the weights of layers that are neighbours in ``MergedLinears``.
    """
    return _joint_product(layers, rows)[1]


def _joint_product(
    layers: Sequence[nn.Module], rows: torch.Tensor, **result: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weights of layers as one, and the product with it; see ``project``."""
    biases = _biases(layers)
    bias = join_rows(biases) if biases else None
    quantized = [layer for layer in layers if isinstance(layer, QuantizedLinear)]
    result["row_invariant"] = all(map(is_row_invariant, layers))
    if quantized:
        joint = QuantizedWeight.join([layer.quantized for layer in quantized])
        return joint.numbers, project_quantized(rows, joint, bias, **result)
    weight = join_rows([layer.weight for layer in layers])  # type: ignore[misc]
    return weight, project(rows, weight, bias, **result)


def _biases(layers: Sequence[nn.Module]) -> list[torch.Tensor]:
    biases = (layer.bias for layer in layers)
    return [bias for bias in biases if isinstance(bias, torch.Tensor)]


def plain_linears(root: ModuleCall) -> set[nn.Module]:
    """Return the called modules that compute ``linear(rows, weight, bias)``, and nothing else.

    The weight may be quantised, and the result may be a summand of this rank. Layers whose columns
    are on several ranks are left out: their neighbours would read the columns of one rank.
    """
    calls = list(root.walk())
    owners = Counter(
        id(weight)
        for _, module in root.module.named_modules()
        for weight in module.parameters(recurse=False)
    )
    return {
        call.module
        for call in calls
        if not gathers_columns(call.module) and _is_plain(call, owners)
    }


def merge_linears(
    root: ModuleCall, linears: set[nn.Module], positions: torch.Tensor
) -> list[MergedLinears]:
    """Merge layers that a module runs on the same tensor.

    A group stays as it is if the module does not compute the same with merged layers, whose
    outputs are not contiguous.
    """
    merged: list[MergedLinears] = []
    done: set[nn.Module] = set()
    for call in root.walk():
        readers = defaultdict(list)
        for inner in call.calls:
            rows = inner.only_input()
            if rows is not None and inner.module in linears - done:
                readers[id(rows), _kind(inner.module)].append(inner.module)
        for layers in readers.values():
            if len(layers) > 1 and len(set(layers)) == len(layers):
                done.update(layers)
                wider = {layer: partial(_widened, layer.forward) for layer in layers}
                with replaced_forwards(wider):
                    same = call.repeats(positions)
                if same:
                    merged.append(MergedLinears(layers))
    return merged


def _is_plain(call: ModuleCall, owners: Counter[int]) -> bool:
    module, rows = call.module, call.only_input()
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    if rows is None or not rows.is_floating_point() or rows.dim() < 2:
        return False
    if isinstance(module, QuantizedLinear):
        return "forward" not in vars(module) and owners[id(weight)] == 1
    if type(weight) is not nn.Parameter or weight.dim() != 2 or weight.dtype != rows.dtype:
        return False
    held = {name for name, _ in (*module.named_parameters(), *module.named_buffers())}
    if held - {"weight", "bias"} or "forward" in vars(module) or owners[id(weight)] > 1:
        return False
    if weight.shape[1] != rows.shape[-1]:
        return False
    sample = random_rows(rows, seed=0)
    return agree(linear(sample, weight, bias), module.forward(sample))


def _kind(module: nn.Module) -> tuple[object, ...]:
    """Return what merged layers have in common."""
    weight: torch.Tensor = module.weight  # type: ignore[assignment]
    quantized = module.quantized.kind if isinstance(module, QuantizedLinear) else None
    return weight.dtype, weight.device, module.bias is None, quantized


def _merge(parameters: Sequence[torch.Tensor]) -> None:
    """Let parameters become views of one tensor of them."""
    if not parameters:
        return
    merged = torch.cat([parameter.data for parameter in parameters])
    sizes = [len(parameter) for parameter in parameters]
    before = [(parameter.data_ptr(), parameter.nbytes) for parameter in parameters]
    for parameter, rows in zip(parameters, merged.split(sizes), strict=True):
        parameter.data = rows
    if merged.device.type == "cpu":
        for address, size in before:
            _drop_file_pages(address, size)


def _drop_file_pages(address: int, size: int) -> None:
    """Let the system take back the pages of memory that maps a file.

    ``safetensors`` maps weights, and the mapping lasts as long as any of its tensors. This is a
    hint, ``MADV_PAGEOUT`` of Linux 5.4: pages that are read again are loaded again. Elsewhere it
    does nothing.
    """
    if sys.platform == "linux":
        page = mmap.PAGESIZE
        begin, end = -(-address // page) * page, (address + size) // page * page
        if begin < end:
            system = ctypes.CDLL(None)
            system.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _PAGEOUT)


def _widened(forward: Any, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
    """Return a part of a wider tensor, as merged layers do."""
    columns = forward(input)
    return torch.cat([columns, columns], -1)[..., : columns.shape[-1]]
