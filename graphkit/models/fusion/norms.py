"""Root mean square norms of any class, and products that the norm behind them adds up."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from graphkit.models.fusion.observation import ModuleCall, Run, agree, random_rows, run_at
from graphkit.models.quantization.linear import Linear, QuantizedLinear
from graphkit.models.residual import DeferredResidualAdd, DeferredSums, normalised
from graphkit.models.running import running_products


class Norm:
    """A norm of rows.

    Args:
        module: The norm, which holds the weight.
        name: Name of the weight in the module, [H].
        eps: Added to the mean square.
        sums: Computes the factor of a column, if it is the weight plus 1 in float32. ``None`` if
            it is the weight.
    """

    def __init__(self, module: nn.Module, name: str, eps: float, sums: WeightSums | None) -> None:
        self.eps = eps
        self._module, self._name, self._sums = module, name, sums

    @property
    def parameter(self) -> torch.Tensor:
        """The weight of the module, [H], as it is now."""
        return self._module.get_parameter(self._name)

    @property
    def weight(self) -> torch.Tensor:
        """Factor of each column, [H]."""
        return self.parameter if self._sums is None else self._sums.of(self)

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Normalise rows, [..., H]."""
        return normalised(hidden_states, self.weight, self.eps)


class WeightSums:
    """Weights of norms plus 1, in float32.

    A forward of graphkit computes those of all norms at once. Captured, it reads the weights of the
    replay, which may have been updated in place since the capture.
    """

    def __init__(self) -> None:
        self.norms: list[Norm] = []

    def of(self, norm: Norm) -> torch.Tensor:
        """Return the sums of one norm, [H]."""
        products = running_products()
        if products is None or norm not in self.norms:
            return norm.parameter.float() + 1
        if self not in products:
            weights = [norm.parameter for norm in self.norms]
            sizes = [len(weight) for weight in weights]
            sums = torch.cat(weights).float() + 1
            products[self] = dict(zip(self.norms, sums.split(sizes), strict=True))
        result: torch.Tensor = products[self][norm]
        return result


def find_norms(root: ModuleCall) -> dict[nn.Module, Norm]:
    """Return the called modules that are root mean square norms."""
    sums = WeightSums()
    norms = {module: _norm(call, sums) for module, call in root.by_module().items()}
    return {module: norm for module, norm in norms.items() if norm is not None}


def _norm(call: ModuleCall, sums: WeightSums) -> Norm | None:
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
        for added in (None, sums):
            norm = Norm(module, name, eps, added)
            if agree(expected, norm(sample)):
                sums.norms += [norm] if added else []
                return norm
    return None


class DeferredProduct:
    """The forward of a linear layer whose parts are added by the norm behind it."""

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
