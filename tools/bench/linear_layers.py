"""Decoder layers of the shapes of Llama-3.1-8B, whose products run in several ways.

They run one after the other with all that is between their products, so that each kernel waits for
the one before it. Attention reads 256 keys of each request, which has up to 8 rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from quantized_linear import op_and_tensors, random_inputs
from torch.nn.functional import linear

from graphkit.ops.decoder import add_rms_norm, rms_norm, silu_and_mul
from graphkit.ops.heads import store_rotated_heads
from graphkit.ops.kernels.quantized_linear_config import Product
from graphkit.ops.paged_attention import paged_attention
from graphkit.ops.registration import OPS

COUNT = 12
"""Layers: 5 GB of weights in bfloat16."""
HEAD_SIZE, CONTEXT = 128, 256
HUMMING: Mapping[str, Mapping[str, object]] = {
    "humming fp8": {"dtype": "float8e4m3"},
    "humming int4": {"dtype": "int4", "group_size": 128, "has_zero_point": True},
}
"""How ``humming-kernels`` quantises weights."""
Tensors = Sequence[Any]
Layer = Mapping[str, Tensors]
"""The tensors of the weight of each product, in the order of ``LAYERS``, or a ``HummingWeight``."""
Multiply = Callable[..., torch.Tensor]
Chosen = Mapping[str, Product]
"""The configurations of some products, by their names."""


class Chain:
    """Decoder layers over rows of requests, which have up to 8 rows each.

    Args:
        layers: The weights of each layer.
        x: The rows; above 8 a multiple of 8.
    """

    def __init__(self, layers: Sequence[Layer], x: torch.Tensor) -> None:
        self._layers, self._x = layers, x
        (rows, size), device = x.shape, x.device
        (qkv, *_), *_ = layers[0].values()
        self._heads = size // HEAD_SIZE, (len(qkv) - size) // 2 // HEAD_SIZE
        self._norm = torch.ones_like(x[0])
        self._frequencies = torch.linspace(1, 1e-4, HEAD_SIZE // 2, device=device)
        requests = -(-rows // 8)
        self._width = rows // requests
        slots = torch.arange(requests * CONTEXT, dtype=torch.int32, device=device)
        self._table = slots.view(requests, CONTEXT)
        self._lengths = torch.full((requests,), CONTEXT, dtype=torch.int32, device=device)
        self._starts = torch.arange(0, rows + 1, self._width, dtype=torch.int32, device=device)
        self._locations = self._table[:, -self._width :].flatten().long()
        shape = len(layers), 2, len(slots), self._heads[1], HEAD_SIZE
        self._caches = torch.zeros(shape, dtype=x.dtype, device=device)

    def run(self, multiply: Multiply) -> torch.Tensor:
        """Run the layers.

        Args:
            multiply: Returns the product of rows and a weight, given the product's name, gated or
                in parts on request.
        """
        norm, eps = self._norm, 1e-5
        stream, normed = self._x, rms_norm(self._x, norm, eps)
        for layer, cache in zip(self._layers, self._caches, strict=True):
            qkv, out, gate_up, down = (partial(multiply, **_named(*each)) for each in layer.items())
            query = store_rotated_heads(
                *cache, self._locations, qkv(normed, split_k_partials=True), self._locations,
                self._frequencies, *self._heads, dtype=stream.dtype,
            )  # fmt: skip
            attended = self._attend(query, *cache).flatten(1)
            normed, stream = add_rms_norm(out(attended, split_k_partials=True), stream, norm, eps)
            gated = gate_up(normed, swiglu=True)
            normed, stream = add_rms_norm(down(gated, split_k_partials=True), stream, norm, eps)
        return normed

    def _attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        return paged_attention(
            query, keys, values, self._table, self._lengths, self._starts, None, HEAD_SIZE**-0.5,
            page_size=1, max_seqlen_q=self._width, follows_store=True,
        )  # fmt: skip


def _named(name: str, tensors: Tensors) -> dict[str, object]:
    return {"name": name, "tensors": tensors}


def by_torch(
    x: torch.Tensor, *, tensors: Tensors, swiglu: bool = False, **_: object
) -> torch.Tensor:
    """Multiply by the library of the device, in one part."""
    product = linear(x, *tensors)
    return silu_and_mul(product) if swiglu else product


def by_op(
    x: torch.Tensor,
    *,
    name: str,
    tensors: Tensors,
    kind: str,
    chosen: Chosen | None = None,
    row_invariant: bool = False,
    **result: bool,
) -> torch.Tensor:
    """Multiply by the op of a kind of weight, some products with a configuration."""
    op = OPS["linear" if kind == "linear" else "quantized_linear"]
    if kind != "linear":
        result["row_invariant"] = row_invariant
    if not chosen or name not in chosen:
        found: torch.Tensor = getattr(torch.ops.graphkit, op.name)(x, *tensors, **result)
        return found
    launched: torch.Tensor = op.launch(op.arguments(x, *tensors, **result), chosen[name])
    return launched


def make_layers(
    shapes: Mapping[str, tuple[int, int]], kind: str, count: int, device: torch.device
) -> list[Layer]:
    """Return layers with weights of a kind, of the same numbers in each layer."""
    layers: list[Layer] = [{} for _ in range(count)]
    for name, shape in shapes.items():
        weight = random_inputs(shape, 1, device)[0] / shape[1] ** 0.5
        _, tensors = op_and_tensors(kind, weight)
        for layer in layers:
            layer[name] = [None if each is None else each.clone() for each in tensors]
    return layers


class HummingWeight:
    """A weight of ``humming-kernels``, checked on 0.1.19, with what is read of a tensor here.

    Args:
        weight: The weight, [N, K].
        config: How it is quantised, a key of ``HUMMING``.

    Attributes:
        nbytes: Bytes of the numbers, scales and zero points.
    """

    def __init__(self, weight: torch.Tensor, config: str) -> None:
        from humming.layer import HummingLayer

        outputs, inputs = weight.shape
        self._outputs = outputs
        self.multiply = HummingLayer(
            shape_n=outputs, shape_k=inputs, weight_config=dict(HUMMING[config]),
            torch_dtype=weight.dtype,
        ).to(weight.device)  # fmt: skip
        self.multiply.load_from_unquantized(weight)
        self.multiply.transform()
        self.nbytes = sum(each.nbytes for each in self.multiply.parameters())

    def __len__(self) -> int:
        """Return the outputs."""
        return self._outputs


def make_humming_layers(
    shapes: Mapping[str, tuple[int, int]], config: str, count: int, device: torch.device
) -> list[Layer]:
    """Return layers as ``make_layers`` does, with weights of ``humming-kernels``."""
    weights = {name: random_inputs(shape, 1, device)[0] for name, shape in shapes.items()}
    return [
        {name: [HummingWeight(w / w.shape[1] ** 0.5, config)] for name, w in weights.items()}
        for _ in range(count)
    ]


def by_humming(
    x: torch.Tensor, *, tensors: Sequence[HummingWeight], swiglu: bool = False, **_: object
) -> torch.Tensor:
    """Multiply by ``humming-kernels``, in one part."""
    product: torch.Tensor = tensors[0].multiply(x)
    return silu_and_mul(product) if swiglu else product


def nbytes_of(layer: Layer) -> int:
    """Return the bytes of a layer's weights and scales."""
    return sum(each.nbytes for tensors in layer.values() for each in tensors if each is not None)
