"""Diagnosis of a wrong replay by further runs of its batch."""

from __future__ import annotations

import math
from typing import Any

from graphkit.audit.pads.batch_variants import Fill, Requests, largest_number, worst_of
from graphkit.audit.pads.bugs import Bug
from graphkit.graphs import StateSnapshot
from graphkit.runners import Runner
from graphkit.verify import Rounding, StepRuns
from graphkit.verify.comparison import restorable_state
from graphkit.verify.differences import Tensors, even_owner, first_difference

_NONDETERMINISTIC = (
    "nondeterministic step. Replays of the batch differ, or runs of it without a graph. Declare "
    "everything that a step changes as mutable_state, and use deterministic kernels."
)
_BAKED = (
    "baked value. The graph kept a host value of its capture, or reads memory that was replaced "
    "since. `graphkit audit --only baked,pointers` names the node."
)
_ROUNDING_IN_GRAPH = (
    "rounding, or a baked value. The graph differs by no more than kernels that add in a different "
    "order. `graphkit audit --only baked,shadow` names the node that differs."
)
_NUMBER_OF_PADS = (
    "dependence on the batch size. The number of pad rows matters, not their contents: look for a "
    "mean or a count over all rows. If kernels of another size round more than expected, pass "
    "tolerance."
)


def probable_bug(runner: Runner[Any, Any], batch: Any, size: int, *, is_padding: bool) -> str:
    """Return the probable class of bug, and advice.

    Restores state and random numbers.

    Args:
        runner: Captured.
        batch: A batch whose replay is wrong.
        size: The captured size.
        is_padding: Whether padding changed live rows; if not, the graph differs.
    """
    live, rounding = batch.batch_size, Rounding(runner.sizes.dtype)

    def differ(one: Tensors, other: Tensors, allowed: float = 0.0) -> bool:
        return first_difference(one, other, even_owner(1), rounding, allowed) is not None

    with StateSnapshot(restorable_state(runner), runner.device) as start:
        runs = StepRuns(runner, batch, size, start)
        padded, replayed = runs.padded(), runs.replay()
        if differ(padded, runs.padded()) or differ(replayed, runs.replay()):
            return _NONDETERMINISTIC
        if not is_padding:
            is_large = differ(padded, replayed, rounding.most)
            return _BAKED if is_large else _ROUNDING_IN_GRAPH
        requests = Requests.of(batch, runner.buffers.layouts, runner.buffers.capacity)
        fills: tuple[Fill, ...] = (
            worst_of(math.nan),
            lambda layout, _rows: largest_number(layout, runner.sizes, runner.steps_ahead()),
        )
        for fill in fills:
            filled = StepRuns(runner, requests.padded(size, fill), size, start).padded()
            rows = {name: each[: len(each) * live // size] for name, each in filled.items()}
            if differ(padded, rows, rounding.beside(0.0)):
                return f"{Bug.LEAKING_PAD_ROW.kind}. {Bug.LEAKING_PAD_ROW.value}"
    return _NUMBER_OF_PADS
