"""Steps of device loops, as the host reads them while the loops run."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from functools import partial
from types import TracebackType
from typing import Self
from weakref import WeakValueDictionary

from graphkit.errors import ReplayError
from graphkit.ops.loop_layout import LoopEnd
from graphkit.step.output_ring import OutputRing, StepReport

_SPINS = 20
"""Polls without a pause."""
_PAUSE_S = 2e-5
_CHECK_EVERY_S = 1.0
_GIVE_UP_S = 60.0


class LoopReader:
    """Reads the ring for the streams of all launches.

    Args:
        ring: The ring.
        advance: Lets a loop advance that runs on the host.
        check_device: Raises the device's pending error.

    Attributes:
        last_ended: Number of the last launch whose last step has been read from the ring.
        steps_by_size: Steps that have been read from the ring, by captured size.
    """

    def __init__(
        self, ring: OutputRing, advance: Callable[[], None], check_device: Callable[[], None]
    ) -> None:
        self.ring, self._advance, self._check_device = ring, advance, check_device
        # Kept by the streams: what no stream will read is dropped.
        self._unread: WeakValueDictionary[int, deque[StepReport]] = WeakValueDictionary()
        self.last_ended = 0
        self.steps_by_size: Counter[int] = Counter()

    def poll(self, unread: deque[StepReport]) -> StepReport | None:
        """Return the next step of a stream if it is there, else ``None``."""
        if (report := self.arrived(unread)) is not None:
            return report
        self._advance()
        return self.arrived(unread)

    def arrived(self, unread: deque[StepReport]) -> StepReport | None:
        """Return what ``poll`` does, but do not let a loop advance that runs on the host."""
        self.collect()
        return unread.popleft() if unread else None

    def collect(self) -> None:
        """Move all steps out of the ring, which makes room for further ones."""
        while (report := self.ring.read()) is not None:
            if (unread := self._unread.get(report.launch)) is not None:
                unread.append(report)
            self.steps_by_size[report.batch_size] += 1
            if report.is_last:
                self.last_ended = report.launch

    def stream(self, launch: int) -> StepStream:
        """Return the steps of a launch."""
        unread: deque[StepReport] = deque()
        self._unread[launch] = unread
        return StepStream(
            partial(self.wait, unread),
            partial(self.poll, unread),
            partial(self.arrived, unread),
            partial(self.ring.stop, launch),
        )

    def wait(self, unread: deque[StepReport]) -> StepReport:
        """Return the next step of a stream as soon as it is there.

        Raises:
            ReplayError: The device wrote no step for a minute.
        """
        began = checked = time.monotonic()
        for _ in range(_SPINS):
            if (report := self.poll(unread)) is not None:
                return report
        read = self.ring.num_read
        while (report := self.poll(unread)) is None:
            time.sleep(_PAUSE_S)
            now = time.monotonic()
            if read != self.ring.num_read:  # a step of an earlier launch
                read, began = self.ring.num_read, now
            if now - checked > _CHECK_EVERY_S:
                checked = now
                self._check_device()
            if now - began > _GIVE_UP_S:
                raise ReplayError(
                    f"the device wrote no step for {_GIVE_UP_S:.0f} s. Look for a kernel that does "
                    "not end."
                )
        return report


class StepStream:
    """The steps of one launch. Iterate over it to read them while the loop runs.

    Each ``next`` waits for the next step in plain memory, without a CUDA call. The iteration ends
    after the step that ended the loop. As a context manager, the stream stops the loop at the end
    of the block, also after an exception. Steps that were not read remain readable then.

    Made by ``SpecStepRunner.launch``. Several streams of one runner may be read in any order.

    Attributes:
        end: Why the loop ended; ``None`` until its last step has been read.
    """

    def __init__(
        self,
        wait: Callable[[], StepReport],
        poll: Callable[[], StepReport | None],
        arrived: Callable[[], StepReport | None],
        stop: Callable[[], None],
    ) -> None:
        self._wait, self._poll, self._arrived, self._stop = wait, poll, arrived, stop
        self.end: LoopEnd | None = None

    def __iter__(self) -> Iterator[StepReport]:
        return self

    def __next__(self) -> StepReport:
        try:
            report = self._read(self._wait)
        except BaseException:  # such as ^C: without a reader, the loop must end
            self.stop()
            raise
        if report is None:
            raise StopIteration
        return report

    def poll(self) -> StepReport | None:
        """Return the next step if it is there, else ``None``. Does not wait.

        The recorder runs the next step when it is polled.
        """
        return self._read(self._poll)

    def available(self) -> Iterator[StepReport]:
        """Wait for the next step, then yield it and all further ones that have arrived.

        Yields nothing after the step that ended the loop. The recorder runs one step per call.
        """
        report = next(self, None)
        while report is not None:
            yield report
            report = self._read(self._arrived)

    def stop(self) -> None:
        """End the loop, and those launched before, after the step that runs.

        Does not wait; may be called at any time.
        """
        self._stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def _read(self, read: Callable[[], StepReport | None]) -> StepReport | None:
        """Return the next step if ``read`` returns one; ``None`` after the last."""
        report = None if self.end is not None else read()
        if report is not None and report.is_last:
            self.end = report.loop_end
        return report
