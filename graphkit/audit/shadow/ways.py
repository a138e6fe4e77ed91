"""The ways of a live batch beside its graph: padded without a graph, and bare.

The padded way is what the graph was made from, on the same shapes. The bare way has no pads; where
a step chooses tokens between its forwards it follows the padded one, see ``targets.lockstep``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from graphkit.audit.moment import Moment
from graphkit.audit.reachable_objects import ReachableObjects
from graphkit.ops.mailbox_layout import Ring
from graphkit.records import Mismatch
from graphkit.runners import Output, Runner
from graphkit.runners.fit import Fit
from graphkit.targets.compare import Tensors, first_difference, tolerance
from graphkit.targets.lockstep import Lockstep, first_far


@dataclass(frozen=True, slots=True)
class Replay:
    """A replay that is to be compared.

    Attributes:
        fit: Its live and captured size.
        batch: What it was given.
        before, after: The moments around it.
        got: The live rows that it made.
        host: What the forward holds on the host, which replays do not change.
    """

    fit: Fit
    batch: Any
    before: Moment
    got: Tensors
    after: Moment
    host: ReachableObjects

    def rewind(self) -> None:
        """Let everything be as before it."""
        self.before.put_back()
        self.host.restore()

    def difference(self, expected: Tensors, got: Tensors, allowed: float = 0.0) -> Mismatch | None:
        """The first live row that differs by more than what is allowed."""
        return first_difference(expected, got, allowed, _owner_in(self.fit))


class Ways:
    """Runs batches of a captured runner without its graphs.

    State, random numbers and what the forward holds on the host are the caller's to put back.
    """

    def __init__(self, runner: Runner[Any]) -> None:
        self._runner, self._buffers, self._parts = runner, runner.buffers, runner.parts
        self._lockstep = Lockstep()

    def now(self) -> Moment:
        """Declared state and random numbers."""
        runner = self._runner
        return Moment(runner.mutable_state, runner.device, runner.sizes.page_size)

    def host(self) -> ReachableObjects:
        """What the forward holds on the host."""
        return ReachableObjects({self._parts.step.name: self._parts.step.forward})

    def read(self, fit: Fit, entry: int, tokens: int) -> Any:
        """The batch that stands in a written entry, which stays to be read by the graph."""
        buffers, mailbox = self._buffers, self._buffers.mailbox
        mailbox.post(entry, fit.requests, tokens)
        self._parts.backend.wait_for_replays()
        buffers.refresh(fit.padded_batch_size)
        rows: dict[str, Any] = {
            layout.name: buffers.live_rows(layout.name, fit.requests, tokens).clone()
            for layout in buffers.layouts
            if layout.name not in buffers.bound_fields
        }
        buffers.refresh_tensors()["sequence"].sub_(1)
        self.wait()
        mailbox.ring[Ring.CONSUMED] -= 1
        return buffers.inputs(**rows)

    def padded(self, batch: Any, fit: Fit) -> Tensors:
        """The live rows that the padded way makes."""
        size = fit.padded_batch_size
        self._buffers.post(batch)
        if self._parts.plan_on_host is not None:
            self._parts.plan_on_host(batch, size)
        with self._watched(), self._lockstep.lead():
            made = [stage() for stage in self._parts.stages(size)][-1]
        output: Output = self._parts.output_type(**made)
        return output.live(fit.requests, fit.tokens).clone().tensors()

    def padding_changes(self, batch: Any, fit: Fit, padded: Tensors) -> Mismatch | None:
        """The first live row of what ``padded`` made last that is another one without pads."""
        with self._watched(), self._lockstep.follow() as meetings:
            bare = self._runner.fall_back(batch).tensors()
        met = first_far(
            meetings,
            lambda each: first_difference(each.made, each.led, tolerance(each.made), each.owner),
        )
        return met or first_difference(bare, padded, tolerance(bare), _owner_in(fit))

    def recover(self) -> None:
        """Forget a batch that a failed way left unread."""
        self.wait()
        self._buffers.mailbox.rewind()

    def wait(self) -> None:
        """Wait until the device has done everything."""
        if self._runner.device.type == "cuda":
            torch.cuda.synchronize(self._runner.device)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        step = self._parts.step
        own, step.forward = step.forward, self._lockstep.watched(step.forward)
        try:
            yield
        finally:
            step.forward = own


def _owner_in(fit: Fit) -> Callable[[int, int], int]:
    """The request that one of so many rows belongs to."""
    return lambda row, rows: row * fit.requests // rows
