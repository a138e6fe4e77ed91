"""Mixtures of experts of transformers by products that read each chosen expert once.

Shapes depend on the number of rows alone, so that they capture.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any

import torch
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, batched_mm_experts_forward

from graphkit.models.quantization.linear import QuantizedExperts, is_row_invariant
from graphkit.models.running import running_slots
from graphkit.ops.experts import (
    SEARCHED_ROWS,
    expert_linear,
    expert_sum,
    gated_products,
    group_by_expert,
    live_choices,
)

IMPLEMENTATION = "graphkit"
"""Name of these experts in the registry of transformers."""
_GATE = "_graphkit_gate"
"""Attribute of experts whose gate ``expert_linear`` computes, with its arguments."""
_TOUCHED = "_graphkit_touched"
"""Attribute of experts whose chosen experts are counted, with the count, [] int64."""
_SAMPLE_COLUMNS = 4096


def experts(
    module: Any,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    *shared: torch.Tensor,
) -> torch.Tensor:
    """Run the experts of each row; an implementation for the registry of transformers.

    Pads of the forward that runs choose no expert, and their result is 0. With gradients, and in
    float64 on CUDA, transformers gathers the weights of each row.

    Args:
        module: The experts, whose class ``use_experts_implementation`` decorates. Weights may be
            ``QuantizedExperts``.
        hidden_states: [T, H].
        top_k_index: Experts of each row, [T, K] int32 or int64.
        top_k_weights: Their weights, [T, K].
        *shared: ``shared`` and ``shared_gate`` of ``expert_sum``, of ``fusion.routers`` alone.

    Returns:
        The weighted sum of the experts of each row, [T, H], and of the shared ones.
    """
    first, down = module.gate_up_proj if module.has_gate else module.up_proj, module.down_proj
    is_plain = not isinstance(first, QuantizedExperts) and not isinstance(down, QuantizedExperts)
    is_wide = hidden_states.is_cuda and hidden_states.dtype == torch.float64
    if is_plain and (torch.is_grad_enabled() or is_wide):
        rows: torch.Tensor = batched_mm_experts_forward(
            module, hidden_states, top_k_index, top_k_weights
        )
        return add_shared(rows, *shared) if shared else rows
    slots, (count, size) = running_slots(len(top_k_index)), (len(down), hidden_states.shape[-1])
    if (touched := vars(module).get(_TOUCHED)) is not None:
        chosen = live_choices(top_k_index, slots, count).flatten().long()
        is_touched = touched.new_zeros(count + 1).scatter_(0, chosen % (count + 1), 1)
        touched += is_touched[:count].sum()
    order, ends = None, None
    if hidden_states.is_cuda and len(hidden_states) > SEARCHED_ROWS:
        order, ends = group_by_expert(top_k_index, count, slots)

    row_invariant = is_row_invariant(module)

    def products(x: torch.Tensor, name: str, **options: Any) -> torch.Tensor:
        held, bias = getattr(module, name), getattr(module, f"{name}_bias", None)
        scale: torch.Tensor | None = None
        zero_point: torch.Tensor | None = None
        if isinstance(held, QuantizedExperts):
            weight, scale, zero_point = held.weight, held.scale, held.zero_point
        else:
            x = x.to(held.dtype)
            weight = held.transpose(1, 2) if module.is_transposed else held
        return expert_linear(
            x, top_k_index, weight, scale, zero_point, bias, slots, order, ends,
            row_invariant=row_invariant, **options,
        )  # fmt: skip

    gate = vars(module).get(_GATE)
    if not module.has_gate:
        inner = module.act_fn(products(hidden_states, "up_proj"))
    elif gate is not None:
        inner = products(hidden_states, "gate_up_proj", swiglu=True, **gate)
    else:
        inner = module._apply_gate(products(hidden_states, "gate_up_proj"))
    rows = products(inner, "down_proj", follows_product=module.has_gate and gate is not None)
    if getattr(module, "has_post_expert_norm", False):  # transformers 5.17 has none
        rows = module.post_expert_norm(rows)
    rows = rows.view(-1, size)
    is_one_dtype = all(each.dtype == rows.dtype == hidden_states.dtype for each in shared)
    joined = shared if is_one_dtype else ()
    total = expert_sum(rows, top_k_weights, top_k_index, count, slots, *joined)
    total = total.to(hidden_states.dtype)
    return total if joined or not shared else add_shared(total, *shared)


def add_shared(
    rows: torch.Tensor, shared: torch.Tensor, gate: torch.Tensor | None = None
) -> torch.Tensor:
    """Return rows and the results of shared experts, [T, H], with the gate's logits, [T, 1]."""
    return rows + (shared if gate is None else torch.sigmoid(gate) * shared)


def experts_of(model: nn.Module) -> list[nn.Module]:
    """Return the modules of a model whose weights the rows of a batch choose."""
    marks = "has_gate", "is_transposed", "down_proj"
    return [module for module in model.modules() if all(hasattr(module, name) for name in marks)]


@contextmanager
def counting_experts(modules: Sequence[nn.Module]) -> Iterator[Callable[[], float]]:
    """Count the experts that rows choose in forwards that begin in the block, captured ones, too.

    Replays of graphs that were captured in the block count, until these are closed.

    Yields:
        A function that returns the bytes of the weights of chosen experts so far, each counted once
        for each forward. It waits for the device.
    """
    counts = {
        module: torch.zeros((), dtype=torch.int64, device=next(module.parameters()).device)
        for module in modules
    }
    for module, count in counts.items():
        vars(module)[_TOUCHED] = count
    sizes = {
        module: sum(weight.nbytes for weight in module.parameters()) / len(module.down_proj)  # type: ignore[arg-type]
        for module in modules
    }
    try:
        yield lambda: sum(int(count) * sizes[module] for module, count in counts.items())
    finally:
        for module in modules:
            del vars(module)[_TOUCHED]


def learn_gates(model: nn.Module) -> None:
    """Note in the experts of a model which gate ``expert_linear`` computes for them; in place.

    It is compared with that of the module on random numbers. Experts with another gate compute it
    themselves.
    """
    for module in model.modules():
        if hasattr(module, "_apply_gate") and getattr(module, "has_gate", False):
            gate = next(_equal_gates(module), None)
            if gate is not None:
                setattr(module, _GATE, gate)


def _equal_gates(module: Any) -> Iterator[dict[str, Any]]:
    """Yield the arguments of ``expert_linear`` that give the gate of a module."""
    limit = _number(module, "limit", "swiglu_limit")
    alpha = _number(module, "alpha", "swiglu_alpha")
    generator = torch.Generator().manual_seed(0)
    sample = torch.randn(1, _SAMPLE_COLUMNS, generator=generator) * max(4.0, 2 * limit)
    try:
        expected = module._apply_gate(sample)
    except Exception:  # of the code of a model, which may need its own sizes or device
        return
    factors = (1.0, 0.0), (alpha or 1.0, 1.0)
    bounds = dict.fromkeys((0.0, limit))
    for bound, (factor, offset), interleaved in product(bounds, factors, (False, True)):
        got = gated_products(sample, interleaved, bound, factor, offset)
        if got.shape == expected.shape and torch.allclose(got, expected, 1e-5, 1e-5):
            yield {"interleaved": interleaved, "limit": bound, "alpha": factor, "offset": offset}


def _number(module: Any, *names: str) -> float:
    """Return the first of some attributes that is a number; 0 if none is."""
    values = (getattr(module, name, None) for name in names)
    numbers = (float(value) for value in values if isinstance(value, int | float))
    return next((number for number in numbers if math.isfinite(number)), 0.0)


ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, experts)
