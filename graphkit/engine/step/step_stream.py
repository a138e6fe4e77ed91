"""Steps of device loops, as the host reads them while the loops run."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from operator import length_hint
from typing import Self
from weakref import ref

from graphkit.engine.step.output_ring import OutputRing, StepBlock, StepReport
from graphkit.errors import ReplayError
from graphkit.ops.loop_layout import LoopEnd

_PAUSES_S = 2e-5, 2e-2
"""Shortest and longest pause between polls."""
_FIRST_PAUSE, _LATER_PAUSE = 0.85, 0.02
"""Pauses in parts of the last wait, and of this one so far. The device idles from the end of a
launch until the host sees it, so later pauses are short: on average, half of one is lost."""
_CHECK_EVERY_S = 1.0
_GIVE_UP_S = 60.0
_MOST_DROPPED, _MOST_UNREAD = 64, 1024
"""Most launches in a row whose streams are dropped, and most that are not read yet."""


class LoopReader:
    """Reads the ring for the streams of all launches.

    Args:
        ring: The ring.
        advance: Lets a loop advance that runs on the host.
        check_device: Raises the device's pending error.
        counts_lengths: Whether the steps have several draft lengths.

    Attributes:
        steps_by_size: Steps that have been read from the ring, by captured size.
        live_sizes: The same by the number of requests that took part.
        lengths: The same by index of the draft length, if there are several.
        times: Words ``PLAIN_TIME`` and ``STEP_TIME`` of the last entry; 0 with one draft length.
    """

    def __init__(
        self,
        ring: OutputRing,
        advance: Callable[[], None],
        check_device: Callable[[], None],
        *,
        counts_lengths: bool,
    ) -> None:
        self._counts_lengths, self.lengths = counts_lengths, Counter[int]()
        self.ring, self._advance, self._check_device = ring, advance, check_device
        self._in_flight: dict[int, tuple[int, ref[deque[StepBlock]]]] = {}
        """Most steps of each launch whose last step has not been read, and where they go."""
        self._unread: dict[int, ref[deque[StepBlock]]] = {}
        """Launches behind the last one whose stream was read or stopped, and where steps go."""
        self.steps_by_size: Counter[int] = Counter()
        self.live_sizes: Counter[int] = Counter()
        self.times = 0, 0
        self._first_pause_s = 0.0

    @property
    def steps_in_flight(self) -> int:
        """Most steps of all launches whose last step has not been read from the ring."""
        return sum([steps for steps, _ in self._in_flight.values()]) if self._in_flight else 0

    def collect(self) -> None:
        """Move all steps out of the ring, which makes room for further ones.

        Steps whose stream was dropped are dropped, too.
        """
        while block := self.ring.read():
            launch, sizes = block.launch, block.batch_sizes
            in_flight = self._in_flight.get(launch)
            if in_flight is not None and (received := in_flight[1]()) is not None:
                _keep(block, received)
            if block.loop_end:
                self._in_flight.pop(launch, None)
            self.ring.release(block)  # last, so that an interrupted call is repeated
            for size in {*sizes}:
                self.steps_by_size[size] += sizes.count(size)
            block.count_live_sizes(self.live_sizes)
            if self._counts_lengths:
                self.lengths.update(block.lengths)
                self.times = block.times

    def end_all(self) -> None:
        """Collect all steps of launches that have all ended."""
        self.collect()
        self._in_flight.clear()
        self._unread.clear()

    def note_read(self, launch: int) -> None:
        """Note that the stream of a launch is read or stopped."""
        if launch in self._unread:
            self._unread = {n: steps for n, steps in self._unread.items() if n > launch}

    def check_unread(self) -> None:
        """Refuse another launch if too many in a row are not read.

        Raises:
            ReplayError: Too many streams were dropped, or wait, and no later one was read.
        """
        if len(self._unread) < _MOST_DROPPED:
            return
        dropped = sum(steps() is None for steps in self._unread.values())
        if dropped >= _MOST_DROPPED or len(self._unread) >= _MOST_UNREAD:
            raise ReplayError(
                f"{len(self._unread)} launches in a row have not been read, and the streams of "
                f"{dropped} of them, with the tokens of their requests, were dropped. Read or stop "
                "the stream of each launch, or call stop_loops."
            )

    def advance(self) -> None:
        """Let a loop advance that runs on the host, and collect its steps."""
        self._advance()
        self.collect()

    def stream(self, launch: int, max_steps: int) -> StepStream:
        """Return the steps of a launch."""
        received: deque[StepBlock] = deque()
        self._in_flight[launch] = max_steps, ref(received)
        self._unread[launch] = ref(received)
        return StepStream(self, launch, received)

    def wait(self, launch: int, received: deque[StepBlock]) -> None:
        """Wait until the stream of a launch has received a step.

        Sleeps for most of the time that the last step took, so that waiting costs little CPU time.

        Raises:
            ReplayError: The device wrote no step for a minute, or all loops were ended.
        """
        self.collect()
        if not received:
            self.advance()
        while not received:
            if launch not in self._in_flight:
                raise ReplayError(
                    f"launch {launch} has ended, and its remaining steps were discarded. Release "
                    "its requests and admit them again."
                )
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
    """

    def __init__(self, reader: LoopReader, launch: int, received: deque[StepBlock]) -> None:
        self._reader, self._launch, self._received = reader, launch, received
        self._block: StepBlock | None = None
        self._offsets: Iterator[int] = iter(())
        """Offsets of the unread steps of ``_block``; the steps of ``_received`` follow."""

    @property
    def end(self) -> LoopEnd | None:
        """Why the loop ended; ``None`` until its last step has been read."""
        if self._block is None or length_hint(self._offsets):
            return None
        return self._block.loop_end or None

    def __iter__(self) -> Iterator[StepReport]:
        while (block := self._current_block()) is not None:
            for offset in self._offsets:
                yield StepReport(block, offset)

    def __next__(self) -> StepReport:
        if (block := self._current_block()) is None:
            raise StopIteration
        return StepReport(block, next(self._offsets))

    def poll(self) -> StepReport | None:
        """Return the next step if it is there, else ``None``. Does not wait.

        The recorder runs the next step when it is polled.
        """
        self._reader.note_read(self._launch)
        self._reader.collect()
        if not self._has_unread and self.end is None:
            self._reader.advance()
        return next(self) if self._has_unread else None

    def available(self) -> Iterator[StepReport]:
        """Wait for the next step, then yield it and all further ones that have arrived.

        Yields nothing after the step that ended the loop. The recorder runs one step per call.
        """
        report = next(self, None)
        while report is not None:
            yield report
            self._reader.collect()
            report = next(self) if self._has_unread else None

    def stop(self) -> None:
        """End the loop, and those launched before, after the step that runs.

        Does not wait; may be called at any time.
        """
        self._reader.note_read(self._launch)
        self._reader.ring.stop(self._launch)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def _has_unread(self) -> bool:
        self._discard_read()
        return bool(self._received or length_hint(self._offsets))

    def _current_block(self) -> StepBlock | None:
        """Wait for an unread step and return its block; ``None`` after the last one."""
        self._reader.note_read(self._launch)
        if not length_hint(self._offsets):
            if self.end is not None:
                return None
            try:
                self._discard_read()
                self._reader.wait(self._launch, self._received)
            except BaseException:  # such as ^C: without a reader, the loop must end
                self.stop()
                raise
            block = self._received[0]
            self._block, self._offsets = block, iter(block.offsets)
            self._discard_read()
        return self._block

    def _discard_read(self) -> None:
        """Remove the current block from those that are to be read."""
        if self._received and self._received[0] is self._block:
            self._received.popleft()


def _keep(block: StepBlock, received: deque[StepBlock]) -> None:
    """Append a block, or replace it if an interrupted call had kept, but not released it."""
    if received and received[-1].number == block.number:
        received[-1] = block
    else:
        received.append(block)
