"""Routers that choose the most probable experts, and blocks that add shared experts to theirs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from graphkit.models.experts import IMPLEMENTATION, experts_of
from graphkit.models.fusion.observation import ModuleCall, agree, random_rows
from graphkit.models.running import Intercepted
from graphkit.ops.experts import choose_experts
from graphkit.ops.linear import project

_DTYPES = torch.float32, torch.bfloat16, torch.float16
_NEAR = {torch.float32: 1e-5}
"""Largest relative difference of factors; others are rounded to two bytes."""
_NEAR_OF_HALF = 1e-2


class Router:
    """A router whose choices are those of ``choose_experts``.

    Args:
        module: The router, whose weight and bias are read at each call.
        weight: Name of its weight, [E, H].
        bias: Name of its bias, [E]; empty without.
        options: Arguments of ``choose_experts`` beside the logits.
        places: Place of logits, factors and experts in its result.
        dtype: Dtype of the product, that of the rows or float32.
    """

    def __init__(
        self,
        module: nn.Module,
        weight: str,
        bias: str,
        options: Mapping[str, Any],
        places: tuple[int, int, int],
        dtype: torch.dtype,
    ) -> None:
        self._module, self._weight, self._bias = module, weight, bias
        self._options, self._places, self._dtype = options, places, dtype

    def __call__(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return logits, factors and experts of rows, [..., H], in the order of the router."""
        bias = self._module.get_parameter(self._bias).to(self._dtype) if self._bias else None
        weight = self._module.get_parameter(self._weight).to(self._dtype)
        rows = hidden_states.reshape(-1, weight.shape[1]).to(self._dtype)
        return self.of(project(rows, weight, bias))

    def chosen(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the experts and their factors, for the arguments of the experts' module."""
        results = self._module(hidden_states)  # a module, so that hooks see it
        return results[self._places[2]], results[self._places[1]]

    def of(self, logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the result for logits, [T, E]."""
        results = logits, *choose_experts(logits, **self._options)
        return tuple(result for _, result in sorted(zip(self._places, results, strict=True)))


def find_routers(root: ModuleCall) -> dict[nn.Module, Router]:
    """Return the called modules that are routers.

    Their own forward runs over logits of which no two of a row are equal: two ways to choose may
    differ among equal ones, and both are right.
    """
    routers = {module: _router(call) for module, call in root.by_module().items()}
    return {module: router for module, router in routers.items() if router is not None}


def _router(call: ModuleCall) -> Router | None:
    module, rows, output = call.module, call.only_input(), call.output
    own = dict(module.named_parameters(recurse=False))
    weights = [name for name, parameter in own.items() if parameter.dim() == 2]
    if rows is None or call.calls or call.products != ["linear"] or len(weights) != 1:
        return None
    if "forward" in vars(module) or any(type(each) is not nn.Parameter for each in own.values()):
        return None
    is_tuple = isinstance(output, tuple) and all(isinstance(x, torch.Tensor) for x in output)
    if not is_tuple or len(output) != 3 or rows.dtype not in _DTYPES:
        return None
    weight = own[weights[0]]
    logits = _different_numbers(rows.numel() // rows.shape[-1], len(weight)).to(rows.device)
    products: list[tuple[Any, ...]] = []

    def given(function: Any, *args: Any, **kwargs: Any) -> Any:
        if function is not torch.nn.functional.linear:
            return function(*args, **kwargs)
        products.append((*args, *kwargs.values()))
        return logits.to(args[0].dtype).view(*args[0].shape[:-1], -1)

    with Intercepted(given), torch.no_grad():
        expected = module.forward(rows)
    if len(products) != 1:
        return None
    ((x, *parameters),) = products
    logits = logits.to(x.dtype)
    names = [
        name
        for each in parameters
        for name, own_one in own.items()
        if each is not None and _is_widened(own_one, each)
    ]
    if x.shape[-1] != rows.shape[-1] or not _is_widened(rows.reshape(x.shape), x):
        return None
    if len(names) != len([each for each in parameters if each is not None]) or len(names) > 2:
        return None
    experts = [n for n, result in enumerate(expected) if result.dtype == torch.int64]
    copies = [
        n
        for n, result in enumerate(expected)
        if n not in experts
        and result.shape[-1] == len(weight)
        and torch.equal(result.float(), logits.float())
    ]
    factors = [n for n in range(3) if n not in (*experts, *copies[:1])]
    if not len(experts) == len(copies[:1]) == len(factors) == 1:
        return None
    places = copies[0], factors[0], experts[0]
    dtype, choices = expected[places[1]].dtype, expected[places[2]].shape[-1]
    for normalise in (False, True):
        options = {"choices": choices, "normalise": normalise, "rounds": dtype != torch.float32}
        router = Router(module, names[0], "".join(names[1:]), options, places, x.dtype)
        if _same(expected, router.of(logits)):
            return router
    return None


def _is_widened(own: torch.Tensor, used: torch.Tensor) -> bool:
    """Return whether a tensor is another one, or has its numbers in float32."""
    if used.dtype == own.dtype:
        return used.data_ptr() == own.data_ptr() and used.shape == own.shape
    return used.dtype == torch.float32 and torch.equal(used, own.float())


def _different_numbers(rows: int, count: int) -> torch.Tensor:
    """Return rows of different numbers that two bytes hold, [rows, count] float32."""
    fractions = 1 + torch.arange(64) / 64.0
    scales = 2.0 ** torch.arange(2, 2 - -(-count // 128), -1)
    numbers = scales[:, None, None] * fractions[:, None] * torch.tensor([1.0, -1.0])
    numbers, generator = numbers.flatten()[:count], torch.Generator().manual_seed(0)
    return torch.stack([numbers[torch.randperm(count, generator=generator)] for _ in range(rows)])


def _same(expected: tuple[torch.Tensor, ...], got: tuple[torch.Tensor, ...]) -> bool:
    """Return whether choices are equal, and factors nearly, on all ranks."""
    is_same = True
    for one, other in zip(expected, got, strict=True):
        near = _NEAR.get(one.dtype, _NEAR_OF_HALF)
        is_same &= one.dtype == other.dtype and one.shape == other.shape
        is_same = is_same and torch.allclose(one.double(), other.double(), rtol=near, atol=0)
    return agree(True, is_same)


def _run_with_shared(
    router: Router,
    experts: nn.Module,
    shared: nn.Module,
    gate: nn.Module | None,
    hidden_states: torch.Tensor,
) -> torch.Tensor:
    """Run a block over rows, [..., H], that adds experts that all rows share to chosen ones.

    ``gate`` projects to the logit of the gate of the shared ones, [..., 1], if they have one.
    """
    rows = hidden_states.reshape(-1, hidden_states.shape[-1])
    added = [shared(rows)] if gate is None else [shared(rows), gate(rows)]
    out: torch.Tensor = experts(rows, *router.chosen(rows), *added)
    return out.view(hidden_states.shape)


def find_shared_experts(
    root: ModuleCall,
    routers: Mapping[nn.Module, Router],
    networks: Collection[nn.Module],
    linears: Collection[nn.Module],
) -> dict[nn.Module, Callable[..., torch.Tensor]]:
    """Return the called modules that add shared experts to chosen ones.

    Args:
        root: The observed forward. The routers run by ``routers`` by now.
        routers: Its routers.
        networks: Its gated networks.
        linears: Its linear layers.
    """
    known = set(experts_of(root.module))
    blocks: dict[nn.Module, Callable[..., torch.Tensor]] = {}
    for module, call in root.by_module().items():
        inner = [each.module for each in call.calls]
        parts = [
            [each for each in inner if each in kind] for kind in (routers, known, networks, linears)
        ]
        counts = [len(part) for part in parts]
        rows = call.only_input()
        if counts[:3] != [1, 1, 1] or counts[3] > 1 or len(inner) != sum(counts) or rows is None:
            continue
        if "forward" in vars(module) or not _runs_here(parts[1][0]):
            continue
        gate = parts[3][0] if parts[3] else None
        router = routers[parts[0][0]]
        block = partial(_run_with_shared, router, parts[1][0], parts[2][0], gate)
        sample = random_rows(rows, seed=2)
        try:
            with torch.no_grad():
                is_same = agree(module.forward(sample), block(sample))
        except (RuntimeError, TypeError, ValueError):  # such as a gate of several columns
            is_same = agree(True, False)
        if is_same:
            blocks[module] = block
    return blocks


def _runs_here(module: Any) -> bool:
    """Return whether experts run by graphkit's implementation, which takes shared ones."""
    return getattr(module.config, "_experts_implementation", None) == IMPLEMENTATION
