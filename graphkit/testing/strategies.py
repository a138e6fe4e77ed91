"""Hypothesis strategies for batches of each mode: valid, and as hostile as valid ones can be.

Requests at the shortest and the longest length and at the borders of pages, one alone and as many
as fit, none and all drafts accepted, one token over and over, the largest ids.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from graphkit.audit.pads.batch_variants import TOKEN_IDS, Fill, Requests, largest_number
from graphkit.buffers import Axis, FieldLayout, capacity_of, fields_of, resolve
from graphkit.config import BufferSizes
from graphkit.errors import ConfigError
from graphkit.runners import Runner
from graphkit.spec import ForwardMode, SpecConfig
from graphkit.targets import RUNNERS, CaptureTarget
from graphkit.testing.structure import Numbers, Step, slots_in_rows

_SEEDS = st.integers(0, 2**16)
_ACCEPTED = ("any", "none", "all")
_NUMBERS = ("any", "smallest", "largest", "one over and over")


def batches(
    mode: ForwardMode,
    spec: SpecConfig,
    sizes: BufferSizes,
    *,
    table: Any = None,
    **options: Any,
) -> st.SearchStrategy[Any]:
    """Batches of a mode, from one request up to ``sizes.max_batch_size``.

    Numpy arrays, or CPU tensors where numpy lacks the dtype or the field travels by address. A
    field of one's own that holds whole numbers gets its pad value: nobody knows what is valid.

    Args:
        mode: A mode that has a runner.
        spec: As for the runner.
        sizes: As for the runner.
        table: The slot of each position of each row of the request pool, [rows, context] whole
            numbers, as in ``ReqToTokenPool.req_to_token``; row 0 is not used. Left out, each row
            has slots of its own, behind those of the row before.
        options: Further settings of the runner: ``optional``, ``inputs_type``,
            ``num_front_tokens``.

    Raises:
        ConfigError: A setting contradicts another one, or requests have no room for a step.
    """
    forward = [print] * spec.num_steps if mode is ForwardMode.MULTI_LAYER_EAGLE else print
    plan = RUNNERS[mode](forward, spec=spec, sizes=sizes, device="cpu", **options)
    if table is None:
        table = slots_in_rows(sizes.max_batch_size, sizes.max_context_len, sizes.page_size)
    slots = torch.as_tensor(table).cpu().numpy().astype(np.int64)
    step = Step(mode, plan.buffers.capacity, slots, options.get("num_front_tokens", 0))
    longest = min(sizes.max_context_len, slots.shape[1]) - step.ahead
    if longest < 1 or len(slots) <= 1:
        raise ConfigError(
            f"requests of {slots.shape[1]} tokens at most have no room for the {step.ahead} that a "
            f"{mode.name} step writes. Make max_context_len larger.",
            field="max_context_len",
        )
    return _drawn(plan, step, longest)


def target_batches(target: CaptureTarget, mode: ForwardMode) -> st.SearchStrategy[Any]:
    """Sample batches of a target, their requests in any order, with hostile token ids.

    Raises:
        TargetError: ``sample_batch`` makes batches of another size than asked.
    """
    return _sampled(target, mode)


@st.composite
def _drawn(draw: st.DrawFn, plan: Runner[Any], step: Step, longest: int) -> Any:
    live = draw(st.integers(1, min(plan.table.max_batch_size, len(step.slots) - 1)))
    random = np.random.default_rng(draw(_SEEDS))
    lengths = st.lists(_lengths(longest, plan.sizes.page_size), min_size=live, max_size=live)
    accepted = {
        "any": random.integers(1, step.most_accepted + 1, live),
        "none": np.full(live, 1),
        "all": np.full(live, step.most_accepted),
    }[draw(st.sampled_from(_ACCEPTED))]
    width = step.capacity.tokens_per_request
    is_tree = any(layout.name == "custom_mask" for layout in plan.buffers.layouts)
    structure = step.fields(
        1 + random.permutation(len(step.slots) - 1)[:live],
        np.array(draw(lengths)),
        accepted,
        _parents(draw, live, width, random) if is_tree else None,
    )
    rows = {Axis.REQUEST: live, Axis.TOKEN: len(structure["positions"]), Axis.NONE: 1}
    values: dict[str, Any] = {}
    for layout in plan.buffers.layouts:
        value = structure.get(layout.name)
        if value is None:
            largest = largest_number(layout, plan.sizes, plan.steps_ahead())
            value = _content(draw, layout, rows[layout.field.axis], largest, random)
        values[layout.name] = _as_given(layout, value)
    return plan.buffers.inputs(**values)


@st.composite
def _sampled(draw: st.DrawFn, target: CaptureTarget, mode: ForwardMode) -> Any:
    batch = target.batch(mode, draw(st.integers(1, target.sizes.max_batch_size)), draw(_SEEDS))
    kind = RUNNERS[mode]
    capacity = capacity_of(
        target.spec,
        target.sizes,
        requests=batch.batch_size,
        tokens_per_request=target.spec.tokens_per_request(mode),
        ragged=kind.ragged,
    )
    layouts = resolve(fields_of(type(batch)), capacity)
    order = draw(st.permutations(range(batch.batch_size)))
    fills: dict[str, Fill] = {
        "any": lambda _layout, _rows: None,
        "smallest": _for_tokens(lambda _layout, _rows: 0),
        "largest": _for_tokens(lambda layout, _rows: largest_number(layout, target.sizes)),
        "one over and over": _for_tokens(lambda _layout, rows: rows[:1]),
    }
    fill = fills[draw(st.sampled_from(_NUMBERS))]
    return Requests.of(batch, layouts, capacity).take(order).filled(fill).batch()


def _for_tokens(fill: Fill) -> Fill:
    return lambda layout, rows: fill(layout, rows) if layout.name in TOKEN_IDS else None


def _lengths(longest: int, page_size: int) -> st.SearchStrategy[int]:
    """Committed tokens of a request: any, and often those at a border."""
    borders = {1, longest, longest - 1, page_size - 1, page_size, page_size + 1}
    valid = sorted(border for border in borders if 1 <= border <= longest)
    return st.sampled_from(valid) | st.integers(1, longest)


def _parents(draw: st.DrawFn, live: int, width: int, random: np.random.Generator) -> Numbers:
    """Chains, stars, and trees between them."""
    before = np.maximum(np.arange(width) - 1, 0)
    parents = {
        "tree": random.integers(0, before + 1, (live, width)),
        "chain": np.tile(before, (live, 1)),
        "star": np.zeros((live, width), dtype=np.int64),
    }
    return parents[draw(st.sampled_from(sorted(parents)))]


def _content(
    draw: st.DrawFn,
    layout: FieldLayout,
    rows: int,
    largest: int | None,
    random: np.random.Generator,
) -> Any:
    shape, flavour = layout.shape(rows), draw(st.sampled_from(_NUMBERS))
    if layout.dtype.is_floating_point:
        if layout.field.on_device:  # hidden states
            scale = {"smallest": 0.0, "largest": 1e3}.get(flavour, 1.0)
            return random.standard_normal(shape) * scale
        return 1 - random.random(shape)  # probabilities and temperatures are above 0
    if largest is None:
        return np.full(shape, layout.pad)
    numbers = {"smallest": 0, "largest": largest, "one over and over": random.integers(largest + 1)}
    if flavour in numbers:
        return np.full(shape, numbers[flavour])
    return random.integers(0, largest + 1, shape)


def _as_given(layout: FieldLayout, value: Any) -> Any:
    """As a caller would bring it: numpy, or a tensor where that is what the field takes."""
    tensor = torch.from_numpy(np.ascontiguousarray(value)).to(layout.dtype)
    is_tensor = layout.field.on_device or layout.dtype is torch.bfloat16
    return tensor if is_tensor else tensor.numpy()
