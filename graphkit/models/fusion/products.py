"""Products that the norm behind them adds up, together with the residual stream."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from graphkit.models.fusion.observation import Run, run_at
from graphkit.models.quantization import Linear, QuantizedLinear
from graphkit.models.residual import DeferredResidualAdd, DeferredSums


class DeferredProduct:
    """The forward of a linear layer whose parts are added by the norm behind it.

    Args:
        layer: The layer.
    """

    def __init__(self, layer: nn.Linear | QuantizedLinear) -> None:
        self._layer = layer
        self._results: list[DeferredResidualAdd] = []
        self._is_tried = False

    def __call__(self, input: torch.Tensor, **result: bool) -> torch.Tensor:  # noqa: A002 - the name in nn.Linear
        """Return the product of rows, [..., N], as a sum that is not computed yet.

        With ``result``, as for ``project``, it is computed.
        """
        kind = QuantizedLinear if isinstance(self._layer, QuantizedLinear) else Linear
        multiply = partial(kind.forward, self._layer, input)  # type: ignore[arg-type]
        if result:
            return multiply(**result)
        parts = multiply(split_k_partials=True)
        product = DeferredResidualAdd(parts, input.dtype)
        if not self._is_tried:
            self._results.append(product)
        return product

    def end_trial(self) -> bool:
        """Return whether all results so far were read by norms, with the residual stream."""
        self._is_tried = True
        results, self._results = self._results, []
        return bool(results) and all(result.is_read_by_norm for result in results)


def defer_products(
    run: Run, positions: torch.Tensor, layers: Iterable[nn.Module], norm_sizes: Collection[int]
) -> None:
    """Let norms add the parts of products that the model adds to the residual stream; in place.

    A forward over random tokens shows which products a model adds to the stream unchanged.

    Args:
        run: Runs the model; see ``Run``.
        positions: Positions of the rows, [ROWS].
        layers: Layers that are not merged.
        norm_sizes: Row sizes of the norms.
    """
    tried = {
        layer: DeferredProduct(layer)
        for layer in layers
        if isinstance(layer, nn.Linear | QuantizedLinear) and layer.out_features in norm_sizes
    }
    before: dict[nn.Module, Any] = {layer: vars(layer).get("forward") for layer in tried}
    for layer, product in tried.items():
        layer.forward = product  # type: ignore[method-assign]
    with DeferredSums(norm_sizes):
        run_at(positions, run, positions)
    for layer, product in tried.items():
        if not product.end_trial():
            vars(layer).pop("forward")
            if before[layer] is not None:
                layer.forward = before[layer]  # type: ignore[method-assign]
