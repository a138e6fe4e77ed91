"""Hypothesis strategies for valid batches of each mode, with the boundary cases of validity.

Requests of the shortest and the longest length and at page boundaries, a single request and as many
as fit, none and all drafts accepted, one token repeated, the largest ids.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from graphkit.audit.batch_variants import Fill, Requests
from graphkit.buffers import FieldLayout, fields_of, resolve, runner_capacity
from graphkit.config import BufferSizes
from graphkit.runners import RUNNERS, Runner
from graphkit.runners.mode_declaration import Numbers, SampleRows
from graphkit.runners.sample_batch import (
    TOKEN_IDS,
    filled_batch,
    largest_number,
    longest_request,
    most_accepted,
    own_slots,
)
from graphkit.runners.targets import CaptureTarget
from graphkit.spec import ForwardMode, SpecConfig

_SEEDS = st.integers(0, 2**16)
_ACCEPTED = ("any", "none", "all")
_NUMBERS = ("any", "smallest", "largest", "one repeated")


def batches(
    mode: ForwardMode, spec: SpecConfig, sizes: BufferSizes, *, table: Any = None, **options: Any
) -> st.SearchStrategy[Any]:
    """Return a strategy for batches of a mode, of one request up to ``sizes.max_batch_size``.

    Fields are numpy arrays, or CPU tensors where numpy lacks the dtype or the graph reads the field
    through its address. An integer field of your own gets its pad value, since its valid values
    are unknown.

    Args:
        mode: A mode that has a runner.
        spec: As for the runner.
        sizes: As for the runner.
        table: KV slot of each position of each row of the request pool, integers
            [rows, context], as ``ReqToTokenPool.req_to_token``; row 0 is not used. By default each
            row has its own slots, behind those of the row before.
        options: Further settings of the runner, such as ``optional_fields``, ``inputs_type``
            or ``num_front_tokens``.

    Raises:
        ConfigError: A setting contradicts another one, or requests have no room for a step.
    """
    kind = RUNNERS[mode]
    forward = [print] * spec.num_steps if kind.takes_layers else print
    runner = kind(forward, spec=spec, sizes=sizes, device="cpu", **options)
    if table is None:
        table = own_slots(sizes.max_batch_size, sizes.max_context_len, sizes.page_size)
    slots = torch.as_tensor(table).cpu().numpy().astype(np.int64)
    context = min(sizes.max_context_len, slots.shape[1]) if len(slots) > 1 else 0
    longest = longest_request(runner, context)
    return _drawn(runner, slots, longest)


def target_batches(target: CaptureTarget, mode: ForwardMode) -> st.SearchStrategy[Any]:
    """Return a strategy for sample batches of a target, reordered and with other token ids.

    Raises:
        TargetError: While drawing: ``sample_batch`` returns a batch of another size.
    """
    return _sampled(target, mode)


@st.composite
def _drawn(draw: st.DrawFn, runner: Runner[Any, Any], slots: Numbers, longest: int) -> Any:
    live = draw(st.integers(1, min(runner.table.max_batch_size, len(slots) - 1)))
    random = np.random.default_rng(draw(_SEEDS))
    lengths = st.lists(_lengths(longest, runner.sizes.page_size), min_size=live, max_size=live)
    accepted = {
        "any": random.integers(1, most_accepted(runner) + 1, live),
        "none": np.full(live, 1),
        "all": np.full(live, most_accepted(runner)),
    }[draw(st.sampled_from(_ACCEPTED))]
    width = runner.tokens_per_request - runner.num_front_tokens
    rows = SampleRows(
        rows=1 + random.permutation(len(slots) - 1)[:live],
        committed=np.array(draw(lengths)),
        accepted=accepted,
        slots=slots,
        parents=_parents(draw, live, width, random),
        num_front_tokens=runner.num_front_tokens,
        width=width,
    )

    def content(layout: FieldLayout, shape: tuple[int, ...]) -> Any:
        largest = largest_number(layout, runner.sizes, runner.steps_ahead())
        return _content(draw, layout, shape, largest, random)

    return filled_batch(runner, rows, content)


@st.composite
def _sampled(draw: st.DrawFn, target: CaptureTarget, mode: ForwardMode) -> Any:
    batch = target.batch(mode, draw(st.integers(1, target.sizes.max_batch_size)), draw(_SEEDS))
    kind = RUNNERS[mode]
    capacity = runner_capacity(
        target.spec,
        target.sizes,
        requests=batch.batch_size,
        tokens_per_request=kind.width(target.spec),
        ragged=kind.ragged,
    )
    layouts = resolve(fields_of(type(batch)), capacity)
    order = draw(st.permutations(range(batch.batch_size)))
    fills: dict[str, Fill] = {
        "any": lambda _layout, _rows: None,
        "smallest": _for_tokens(lambda _layout, _rows: 0),
        "largest": _for_tokens(lambda layout, _rows: largest_number(layout, target.sizes)),
        "one repeated": _for_tokens(lambda _layout, rows: rows[:1]),
    }
    fill = fills[draw(st.sampled_from(_NUMBERS))]
    return Requests.from_batch(batch, layouts, capacity).take(order).filled(fill).batch()


def _for_tokens(fill: Fill) -> Fill:
    return lambda layout, rows: fill(layout, rows) if layout.name in TOKEN_IDS else None


def _lengths(longest: int, page_size: int) -> st.SearchStrategy[int]:
    """Return a strategy for the committed tokens of a request, often at a boundary."""
    boundaries = {1, longest, longest - 1, page_size - 1, page_size, page_size + 1}
    valid = sorted(length for length in boundaries if 1 <= length <= longest)
    return st.sampled_from(valid) | st.integers(1, longest)


def _parents(draw: st.DrawFn, live: int, width: int, random: np.random.Generator) -> Numbers:
    """Draw the parents of tree nodes: chains, stars and trees in between."""
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
    shape: tuple[int, ...],
    largest: int | None,
    random: np.random.Generator,
) -> Any:
    choice = draw(st.sampled_from(_NUMBERS))
    if layout.dtype.is_floating_point:
        if layout.field.by_address:  # hidden states
            scale = {"smallest": 0.0, "largest": 1e3}.get(choice, 1.0)
            return random.standard_normal(shape) * scale
        return 1 - random.random(shape)  # probabilities and temperatures are above 0
    if largest is None:
        return np.full(shape, layout.pad)
    numbers = {"smallest": 0, "largest": largest, "one repeated": random.integers(largest + 1)}
    if choice in numbers:
        return np.full(shape, numbers[choice])
    return random.integers(0, largest + 1, shape)
