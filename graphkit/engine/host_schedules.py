"""Schedules whose steps the host enqueues: v1 and v2. See ``device_schedule`` for v3.

v1 (host in the loop) waits for the accepted tokens of every step. The host knows which requests
have finished before the draft model catches up.

v2 (overlapped) enqueues a step before it reads the tokens of the previous one, so host and device
work at the same time. The host learns one step late that a request has finished; the tokens of the
extra step are dropped.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from graphkit.engine.request import Request
from graphkit.engine.running_batch import PendingReport, RunningBatch
from graphkit.engine.schedule import Schedule
from graphkit.engine.step import StepResult
from graphkit.ops.loop_layout import Report


class HostInLoop(Schedule):
    """Generation v1: waits for each step's tokens; see ``Schedule``."""

    def begin(self, requests: Sequence[Request], report: torch.Tensor) -> None:
        """See ``Schedule.begin``. Waits for the tokens."""
        self._forget_rows(requests)
        PendingReport.send(requests, report, None).deliver()

    def advance(
        self,
        batch: RunningBatch,
        *,
        is_anyone_waiting: bool,  # noqa: ARG002
        is_prefilling: bool,  # noqa: ARG002
    ) -> None:
        """See ``Schedule.advance``. Waits for verify, before the draft model catches up."""
        requests = batch.requests
        self._steps_left -= 1
        result = self._draft_and_verify(batch)
        pending = PendingReport.send(requests, result.report, result.body)
        self._deliver_one(pending)
        accepted = pending.report[:, Report.ACCEPTED].tolist()
        catch_up = [
            0 if request.is_finished else count
            for request, count in zip(requests, accepted, strict=True)
        ]
        result.body.drafter.extend_accepted(result.verified, catch_up)

    def _catch_up(self, result: StepResult) -> None:
        counts = result.verified.counts.num_accepted_tokens.tolist()
        result.body.drafter.extend_accepted(result.verified, counts)


class Overlapped(Schedule):
    """Generation v2: enqueues a step before it reads the one before; see ``Schedule``."""

    def begin(self, requests: Sequence[Request], report: torch.Tensor) -> None:
        """See ``Schedule.begin``. Does not wait; the next step delivers the tokens."""
        self._forget_rows(requests)
        self._pending.append(PendingReport.send(requests, report, None))

    def advance(
        self,
        batch: RunningBatch,
        *,
        is_anyone_waiting: bool,  # noqa: ARG002
        is_prefilling: bool,  # noqa: ARG002
    ) -> None:
        """See ``Schedule.advance``. Waits for earlier steps only, after enqueueing this one."""
        self._steps_left -= 1
        self._enqueue(batch)
        self._deliver(len(self._pending) - 1)

    def _enqueue(self, batch: RunningBatch) -> None:
        """Enqueue a whole step without waiting for the device."""
        result = self._draft_and_verify(batch)
        self._pending.append(PendingReport.send(batch.requests, result.report, result.body))
        self._catch_up(result)

    def _catch_up(self, result: StepResult) -> None:
        result.body.drafter.extend(result.verified)
