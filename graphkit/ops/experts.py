"""The experts that each row chooses, and products with their weights.

Dimensions: T rows, C choices of a row, P = T * C pairs of a row and a choice, X rows that are T or
P, E experts, K inputs, N outputs, L numbers or bytes of an output, R rows and B columns of scales,
H columns of a result.
"""

from __future__ import annotations

from typing import Annotated, Any

import torch
from torch.nn import functional

from graphkit.errors import InputError
from graphkit.ops.argument_rules import describe
from graphkit.ops.decoder import in_vectors
from graphkit.ops.linear import multiply
from graphkit.ops.quantized_layout import blocks, dequantized, pairs
from graphkit.ops.registration import register_op

SEARCHED_ROWS = 16
"""Most rows in whose choices a kernel finds the rows of an expert itself."""
QUANTIZED = (torch.float8_e4m3fn, torch.uint8)
"""Dtypes of numbers that have scales."""


def _check_choices(args: Any) -> None:
    """Refuse more choices than experts."""
    if args.choices > args.logits.shape[1]:
        raise InputError(
            f"choose_experts: choices is {args.choices}, but logits is {describe(args.logits)}: a "
            "row chooses an expert once.",
            field="choices",
        )


def empty_choices(args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate the results of ``choose_experts``."""
    logits = args.logits
    shape = len(logits), args.choices
    dtype = logits.dtype if args.rounds else torch.promote_types(logits.dtype, torch.float32)
    factors = torch.empty(shape, dtype=dtype, device=logits.device)
    return factors, torch.empty(shape, dtype=torch.int64, device=logits.device)


@register_op(fake=empty_choices, check=_check_choices)
def choose_experts(
    logits: Annotated[torch.Tensor, "[T, E >= 1] floating-point"],
    choices: Annotated[int, "C >= 1"],
    normalise: bool = False,
    rounds: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the most probable experts of each row, the most probable first.

    The probabilities are the softmax of the logits over all experts, in float32. Of experts with
    equal ones, the first is chosen. One launch.

    Args:
        logits: A logit of each expert, of rows that may be spaced.
        choices: Experts of a row (C).
        normalise: Whether the probabilities of the chosen ones are divided by their sum.
        rounds: Whether the factors have the dtype of the logits, and not float32.

    Returns:
        The factors of the choices, [T, C], and the experts, [T, C] int64.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    probs = wide.softmax(-1)
    order = probs.nan_to_num(-1.0).sort(dim=-1, descending=True, stable=True).indices
    experts = order[:, :choices].contiguous()
    factors = probs.gather(1, experts)
    if normalise:
        factors = factors / factors.sum(-1, keepdim=True)
    return factors.to(logits.dtype if rounds else wide.dtype), experts


def _check(args: Any) -> None:
    """Refuse rows, weights and scales that do not belong together."""
    op, weight, scale = "expert_linear", args.weight, args.scale
    (rows, inputs), (tokens, choices) = args.x.shape, args.experts.shape
    if rows not in (tokens, tokens * choices):
        raise InputError(
            f"{op}: x is {describe(args.x)}, expected {tokens} rows, or {tokens * choices}, one "
            "for each choice.",
            field="x",
        )
    is_quantized = weight.dtype in QUANTIZED
    if not is_quantized and weight.dtype != args.x.dtype:
        raise InputError(
            f"{op}: weight is {describe(weight)}, expected {args.x.dtype}, float8_e4m3fn or uint8.",
            field="weight",
        )
    is_packed = weight.dtype == torch.uint8
    outputs, expected = weight.shape[1], 128 * pairs(inputs) if is_packed else inputs
    if weight.shape[2] != expected:
        raise InputError(
            f"{op}: weight is {describe(weight)}, expected {expected} columns for {inputs} inputs.",
            field="weight",
        )
    if is_quantized != (scale is not None):
        raise InputError(
            f"{op}: weight is {describe(weight)} and scale is "
            f"{'None' if scale is None else describe(scale)}. Pass scales for float8_e4m3fn and "
            "uint8, and only for them.",
            field="scale",
        )
    if scale is not None and (
        scale.shape[1] not in ((outputs,) if is_packed else (1, blocks(outputs), outputs))
        or scale.shape[2] not in (1, blocks(inputs))
    ):
        raise InputError(
            f"{op}: scale is {describe(scale)}, expected 1, {blocks(outputs)} or {outputs} rows "
            f"of an expert ({outputs} if packed) and 1 or {blocks(inputs)} columns.",
            field="scale",
        )
    if args.zero_point is not None and not is_packed:
        raise InputError(
            f"{op}: zero_point is for numbers of four bits, but weight is {describe(weight)}. Pass "
            "None.",
            field="zero_point",
        )
    if args.swiglu and outputs % 2:
        raise InputError(
            f"{op}: weight is {describe(weight)}, expected an even number of outputs: those of the "
            "gate and of the up projection.",
            field="weight",
        )


def empty_products(args: Any) -> torch.Tensor:
    """Allocate the result of ``expert_linear``."""
    columns = args.weight.shape[1] // (2 if args.swiglu else 1)
    return torch.empty(args.experts.numel(), columns, dtype=args.x.dtype, device=args.x.device)


@register_op(
    fake=empty_products,
    check=_check,
    sizes_from=("experts", "weight", "scale"),
    is_costly=True,
)
def expert_linear(
    x: Annotated[torch.Tensor, "[X, K >= 1] floating-point"],
    experts: Annotated[torch.Tensor, "[T, C >= 1] int32 or int64"],
    weight: Annotated[torch.Tensor, "[E >= 1, N >= 1, L]"],
    scale: Annotated[torch.Tensor | None, "[E, R, B] float32 or bfloat16 or float16"] = None,
    zero_point: Annotated[torch.Tensor | None, "[E, R, B] uint8"] = None,
    bias: Annotated[torch.Tensor | None, "[E, N] floating-point"] = None,
    slots: Annotated[torch.Tensor | None, "[T] int32 or int64"] = None,
    order: Annotated[torch.Tensor | None, "[P] int32"] = None,  # noqa: ARG001 - for CUDA
    ends: Annotated[torch.Tensor | None, "[E] int32"] = None,  # noqa: ARG001
    swiglu: bool = False,
    interleaved: bool = False,
    limit: float = 0.0,
    alpha: float = 1.0,
    offset: float = 0.0,
    follows_product: bool = False,  # noqa: ARG001 - for CUDA
    row_invariant: bool = True,  # noqa: ARG001 - rows on a CPU always are
) -> torch.Tensor:
    """Multiply each row with the weights of the experts that it chose.

    On CUDA, the kernel reads the weight of each chosen expert once for up to 64 of its rows, and of
    no other. It adds all inputs of an output in order. The host does not read the choices.

    Args:
        x: The rows, X = T; or one row for each choice, X = T * C, those of a row together.
        experts: Choices of each row. A choice that is no expert counts for nothing.
        weight: A weight of each expert, of x's dtype and with any strides; or, as
            ``quantized_linear`` reads it, of float8_e4m3fn (L = K) or packed numbers of four bits.
        scale: Scales of each expert, as for ``quantized_linear``.
        zero_point: As for ``quantized_linear``.
        bias: Added to the products, after these are rounded to x's dtype.
        slots: KV slot of each row. Rows of slot 0 are pads, and choose no expert.
        order: Pairs by expert, as ``group_by_expert`` returns them, P = T * C. Pass it and ``ends``
            for more than ``SEARCHED_ROWS`` rows, where the op otherwise computes both itself.
        ends: Number of pairs up to each expert.
        swiglu: Whether to return ``up * silu(gate)`` of the products, as
            ``(clamp(up, -limit, limit) + offset) * g * sigmoid(alpha * g)``, g = min(gate, limit).
            The factor of g is rounded to x's dtype before the product.
        interleaved: Whether outputs of the gate and of the up projection alternate. Otherwise those
            of the gate come first.
        limit: Bound of gate and up projection; 0 for none.
        alpha: Factor within the sigmoid.
        offset: Added to the up projection.
        follows_product: Whether the last launch on the stream is this op with the same ``experts``,
            ``slots``, ``order`` and ``ends``. They may then be read while it runs, on compute
            capability 9.0 and above.
        row_invariant: Whether the bits of a row depend on the row alone. Without it, rows of
            bfloat16 run by ``torch.nn.functional.grouped_mm`` if they have more than 128 pairs for
            each expert, and more than 256 rows of quantised weights run by warpgroups.

    Returns:
        The products of each row and choice, [P, N] of x's dtype; with ``swiglu`` [P, N / 2]. Those
        of pads, and of choices that are no expert, are undefined.
    """
    choices = experts.shape[1]
    chosen = live_choices(experts, slots, len(weight)).flatten()
    rows = x if len(x) == len(chosen) else x.repeat_interleave(choices, 0)
    is_quantized, wide = scale is not None, torch.promote_types(x.dtype, torch.float32)
    products = x.new_zeros(len(chosen), weight.shape[1])
    for expert in chosen.unique().tolist():
        if expert < 0:
            continue
        matrix, own = weight[expert], chosen == expert
        if is_quantized:
            zero = None if zero_point is None else zero_point[expert]
            matrix = dequantized(matrix, scale[expert], zero, x.shape[1], wide)  # type: ignore[index]
        products[own] = multiply(rows[own].to(matrix.dtype), matrix).to(x.dtype)
        if bias is not None:
            products[own] += bias[expert].to(x.dtype)
    return gated_products(products, interleaved, limit, alpha, offset) if swiglu else products


def live_choices(
    experts: torch.Tensor, slots: torch.Tensor | None, num_experts: int
) -> torch.Tensor:
    """Return the choices of rows, [T, C], with -1 for pads and for what is no expert."""
    is_live = (experts >= 0) & (experts < num_experts)
    if slots is not None:
        is_live &= (slots > 0)[:, None]
    return experts.where(is_live, -1)


@register_op()
def group_by_expert(
    experts: Annotated[torch.Tensor, "[T, C >= 1] int32 or int64"],
    num_experts: Annotated[int, "E >= 1"],
    slots: Annotated[torch.Tensor | None, "[T] int32 or int64"] = None,
) -> tuple[Annotated[torch.Tensor, "[T * C] int32"], Annotated[torch.Tensor, "[E] int32"]]:
    """Return the pairs of a row and a choice in the order of their experts.

    One launch for up to 4,096 pairs. It does not wait for the device.

    Args:
        experts: As for ``expert_linear``. Pairs of no expert come last.
        num_experts: Number of experts.
        slots: As for ``expert_linear``.

    Returns:
        The pairs, row * C + choice, and the number of pairs of each expert and those before it.
    """
    return group_by_sort(experts, num_experts, slots)


def group_by_sort(
    experts: torch.Tensor, num_experts: int, slots: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what ``group_by_expert`` returns, by a sort of torch."""
    chosen = live_choices(experts, slots, num_experts).flatten()
    keys, order = chosen.where(chosen >= 0, num_experts).sort(stable=True)
    numbers = torch.arange(num_experts, device=keys.device, dtype=keys.dtype)
    return order.int(), torch.searchsorted(keys, numbers, right=True).int()


def gated_products(
    products: torch.Tensor, interleaved: bool, limit: float, alpha: float, offset: float
) -> torch.Tensor:
    """Return the gated products of ``expert_linear``."""
    wide = products.to(torch.promote_types(products.dtype, torch.float32))
    gate, up = (wide[:, ::2], wide[:, 1::2]) if interleaved else wide.chunk(2, dim=-1)
    if limit:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    if alpha == 1:
        glu = in_vectors(functional.silu, gate)
    else:
        glu = gate * in_vectors(torch.sigmoid, alpha * gate)
    return ((up + offset) * glu.to(products.dtype)).to(products.dtype)


def _check_sum(args: Any) -> None:
    """Refuse rows that are not one for each choice, and shared rows of other dtypes."""
    others = [each for each in (args.shared, args.shared_gate) if each is not None]
    if any(each.dtype != args.rows.dtype for each in others) or (others and args.shared is None):
        raise InputError(
            f"expert_sum: shared and shared_gate are {', '.join(map(describe, others))}, expected "
            f"{args.rows.dtype}, and shared beside shared_gate.",
            field="shared",
        )
    if len(args.rows) != args.experts.numel():
        raise InputError(
            f"expert_sum: rows is {describe(args.rows)}, expected {args.experts.numel()} rows, one "
            "for each choice.",
            field="rows",
        )


@register_op(check=_check_sum, sizes_from=("experts",))
def expert_sum(
    rows: Annotated[torch.Tensor, "[P, H >= 1] floating-point"],
    factors: Annotated[torch.Tensor, "[T, C] floating-point"],
    experts: Annotated[torch.Tensor, "[T, C >= 1] int32 or int64"],
    num_experts: Annotated[int, "E >= 1"],
    slots: Annotated[torch.Tensor | None, "[T] int32 or int64"] = None,
    shared: Annotated[torch.Tensor | None, "[T, H] floating-point"] = None,
    shared_gate: Annotated[torch.Tensor | None, "[T, 1] floating-point"] = None,
) -> Annotated[torch.Tensor, "[T, H] rows.dtype"]:
    """Return the weighted sum over the experts of each row, in the order of its choices.

    Products and sums are of float32, and the sum is rounded once. One launch.

    Args:
        rows: A row for each choice, P = T * C, as ``expert_linear`` returns them.
        factors: Weights of the choices.
        experts: As for ``expert_linear``. What is no expert adds nothing.
        num_experts: Number of experts.
        slots: As for ``expert_linear``. The sum of a pad is 0.
        shared: Results of experts that all rows share, of the rows' dtype. They are added to the
            rounded sums.
        shared_gate: Logits of their gate: they are first multiplied with its sigmoid, which is
            rounded to its dtype, and so is the product.

    Returns:
        The sums, [T, H] of the rows' dtype.
    """
    is_chosen = live_choices(experts, slots, num_experts) >= 0
    wide = torch.promote_types(rows.dtype, torch.float32)
    terms = rows.to(wide).view(*experts.shape, -1) * factors.to(wide)[..., None]
    total = torch.zeros_like(terms[:, 0])
    for term, is_one in zip(terms.unbind(1), is_chosen.unbind(1), strict=True):
        total = total + term.where(is_one[:, None], 0)
    result = total.to(rows.dtype)
    if shared is None:
        return result
    if shared_gate is not None:
        shared = in_vectors(torch.sigmoid, shared_gate) * shared
    return result + shared
