"""What kind of bug makes a replay wrong, told by a few more runs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import torch

from graphkit.audit.pads.batch_variants import Fill, Requests, largest_number, worst_of
from graphkit.audit.pads.bugs import Bug
from graphkit.graphs import preserved
from graphkit.runners import Runner
from graphkit.targets.compare import Tensors, first_difference

_BAKED = (
    "baked value. The graph kept what the host knew at capture, or reads memory that moved since. "
    "`graphkit audit --only baked,pointers` names the node."
)
_RESTLESS = (
    "replays differ by themselves, also without a graph. Declare everything that a step changes as "
    "state, and draw no random numbers."
)
_NUMBER_OF_PADS = (
    "not what pad rows hold, but that there are any: a mean over all rows, say. Or kernels of "
    "another size round more than expected: then pass rtol or atol."
)


def likely_bug(
    runner: Runner[Any], state: Mapping[str, torch.Tensor], batch: Any, size: int, guilty: str
) -> str:
    """The class of bug, and what to do.

    Args:
        runner: Captured. Its shadow mode is changed.
        state: What runs change; put back after each.
        batch: One whose replay is wrong.
        size: The captured size.
        guilty: ``graph`` or ``padding``.
    """

    def rows(batch_: Any, shadow: Literal["padded"] | None = "padded") -> Tensors:
        with preserved(state):
            runner.shadow = shadow
            output = runner.replay(batch_, padded_batch_size=size, clone=True).tensors()
        return {
            name: each[: len(each) * live // batch_.batch_size] for name, each in output.items()
        }

    live = batch.batch_size
    padded = rows(batch)
    if _differ(padded, rows(batch)) or _differ(rows(batch, None), rows(batch, None)):
        return _RESTLESS
    if guilty == "graph":
        return _BAKED
    requests = Requests.of(batch, runner.buffers.layouts, runner.buffers.capacity)
    fills: tuple[Fill, ...] = (
        worst_of(math.nan),
        lambda layout, _rows: largest_number(layout, runner.sizes, runner.steps_ahead()),
    )
    for fill in fills:
        if _differ(padded, rows(requests.padded(size, fill))):
            return f"{Bug.LEAKING_PAD_ROW.kind}. {Bug.LEAKING_PAD_ROW.value}"
    return _NUMBER_OF_PADS


def _differ(one: Tensors, other: Tensors) -> bool:
    return first_difference(one, other, 0.0, lambda _row, _rows: 0) is not None
