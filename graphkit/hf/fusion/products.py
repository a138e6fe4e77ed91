"""Products that the norm behind them adds up, together with the residual stream."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from graphkit.hf.fusion.residual import PendingSum
from graphkit.quantization import Linear, QuantizedLinear


class DeferredProduct:
    """The forward of a linear layer whose parts are added by the norm behind it.

    Args:
        layer: The layer.
    """

    def __init__(self, layer: nn.Linear | QuantizedLinear) -> None:
        self._layer = layer
        self._results: list[PendingSum] = []
        self._is_tried = False

    def __call__(self, input: torch.Tensor, **result: bool) -> torch.Tensor:  # noqa: A002 - the name in nn.Linear
        """Return the product of rows, [..., N], as a sum that is not computed yet.

        With ``result``, as for ``project``, it is computed.
        """
        kind = QuantizedLinear if isinstance(self._layer, QuantizedLinear) else Linear
        multiply = partial(kind.forward, self._layer, input)  # type: ignore[arg-type]
        if result:
            return multiply(**result)
        parts = multiply(in_parts=True)
        found = PendingSum(parts, input.dtype)
        if not self._is_tried:
            self._results.append(found)
        return found

    def end_trial(self) -> bool:
        """Return whether all results so far were read by norms, with the residual stream."""
        self._is_tried = True
        results, self._results = self._results, []
        return bool(results) and all(result.is_unread_product for result in results)


def defer_products(layers: Iterable[nn.Module], run: Callable[[], object]) -> None:
    """Let layers return products that wait for the norm behind them, where one reads them.

    Args:
        layers: Linear layers whose outputs may be added to the residual stream.
        run: Runs the model under ``DeferredSums``.
    """
    tried = {layer: DeferredProduct(layer) for layer in layers}  # type: ignore[arg-type]
    before: dict[nn.Module, Any] = {layer: vars(layer).get("forward") for layer in tried}
    for layer, product in tried.items():
        layer.forward = product
    run()
    for layer, product in tried.items():
        if not product.end_trial():
            vars(layer).pop("forward")
            if before[layer] is not None:
                layer.forward = before[layer]
