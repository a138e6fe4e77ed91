"""Steps of device loops, as the host reads them while the loops run."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from operator import attrgetter
from types import TracebackType
from typing import Self
from weakref import WeakValueDictionary

from graphkit.errors import ReplayError
from graphkit.ops.loop_layout import LoopEnd
from graphkit.step.output_ring import OutputRing, StepReport

_BATCH_SIZE = attrgetter("batch_size")
_PAUSES_S = 2e-5, 2e-2
"""Shortest and longest pause between polls."""
_FIRST_PAUSE, _LATER_PAUSE = 0.85, 0.02
"""Pauses in parts of the last wait, and of this one so far. The device idles from the end of a
launch until the host sees it, so later pauses are short: on average, half of one is lost."""
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
        self._first_pause_s = 0.0

    def collect(self) -> None:
        """Move all steps out of the ring, which makes room for further ones."""
        while steps := self.ring.read():
            launch = steps[0].launch
            if (unread := self._unread.get(launch)) is not None:
                unread.extend(steps)
            self.steps_by_size.update(map(_BATCH_SIZE, steps))
            if steps[-1].is_last:
                self.last_ended = launch

    def advance(self) -> None:
        """Let a loop advance that runs on the host, and collect its steps."""
        self._advance()
        self.collect()

    def stream(self, launch: int) -> StepStream:
        """Return the steps of a launch."""
        unread: deque[StepReport] = deque()
        self._unread[launch] = unread
        return StepStream(self, launch, unread)

    def wait(self, unread: deque[StepReport]) -> None:
        """Wait until a stream has an unread step.

        Sleeps for most of the time that the last step took, so that waiting costs little CPU time.

        Raises:
            ReplayError: The device wrote no step for a minute.
        """
        self.advance()
        while not unread:
            self._wait_for_any_step()

    def _wait_for_any_step(self) -> None:
        read, pause, pauses = self.ring.num_read, self._first_pause_s, 0
        began = checked = now = time.monotonic()
        while read == self.ring.num_read:
            time.sleep(min(max(pause, _PAUSES_S[0]), _PAUSES_S[1]))
            self.advance()
            now = time.monotonic()
            pause, pauses = _LATER_PAUSE * (now - began), pauses + 1
            if now - checked > _CHECK_EVERY_S:
                checked = now
                self._check_device()
            if now - began > _GIVE_UP_S:
                raise ReplayError(
                    f"the device wrote no step for {_GIVE_UP_S:.0f} s. Look for a kernel that does "
                    "not end."
                )
        # A step that is there after the first pause may have been there for long.
        is_late = pauses == 1
        self._first_pause_s = _FIRST_PAUSE * (self._first_pause_s if is_late else now - began)


class StepStream:
    """The steps of one launch. Iterate over it to read them while the loop runs.

    Each ``next`` waits for the next step in plain memory, without a CUDA call. The iteration ends
    after the step that ended the loop. As a context manager, the stream stops the loop at the end
    of the block, also after an exception. Steps that were not read remain readable then.

    Made by ``SpecStepRunner.launch``. Several streams of one runner may be read in any order.

    Attributes:
        end: Why the loop ended; ``None`` until its last step has been read.
    """

    def __init__(self, reader: LoopReader, launch: int, unread: deque[StepReport]) -> None:
        self._reader, self._launch, self._unread = reader, launch, unread
        self.end: LoopEnd | None = None

    def __iter__(self) -> Iterator[StepReport]:
        return self

    def __next__(self) -> StepReport:
        if not self._unread:
            self._wait()
        report = self._unread.popleft()
        if report.loop_end:
            self.end = report.loop_end
        return report

    def poll(self) -> StepReport | None:
        """Return the next step if it is there, else ``None``. Does not wait.

        The recorder runs the next step when it is polled.
        """
        self._reader.collect()
        if not self._unread and self.end is None:
            self._reader.advance()
        return next(self) if self._unread else None

    def available(self) -> Iterator[StepReport]:
        """Wait for the next step, then yield it and all further ones that have arrived.

        Yields nothing after the step that ended the loop. The recorder runs one step per call.
        """
        report = next(self, None)
        while report is not None:
            yield report
            self._reader.collect()
            report = next(self) if self._unread else None

    def stop(self) -> None:
        """End the loop, and those launched before, after the step that runs.

        Does not wait; may be called at any time.
        """
        self._reader.ring.stop(self._launch)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def _wait(self) -> None:
        """Wait for an unread step. Raises ``StopIteration`` after the last one."""
        if self.end is not None:
            raise StopIteration
        try:
            self._reader.wait(self._unread)
        except BaseException:  # such as ^C: without a reader, the loop must end
            self.stop()
            raise
