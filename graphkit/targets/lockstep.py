"""Running a step twice, the second time along the choices of the first.

A draft step chooses tokens between its forwards, and its output may be nothing but choices. Where
two tokens are almost equally likely the rounding of a kernel decides, and all that follows is
another draft, as right as the first. So the ends of two runs say nothing.

Instead one run leads and the other follows. What each forward of the follower made is put beside
what the leader's made at that point, to be compared as numbers; then the step goes on with the
leader's. Everything else is graphkit's own: from the same numbers it must make the same choices,
to the integer, in any precision. Keys and values the follower writes and reads as it made them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from graphkit.buffers import Inputs
from graphkit.records import Mismatch
from graphkit.runners import Output
from graphkit.runners.step import name_of
from graphkit.targets.target import CaptureTarget


@dataclass(frozen=True, slots=True)
class Meeting:
    """What a forward made in both runs.

    Attributes:
        inputs: The follower's; every row is live.
        made: The follower's result, by field.
        led: The leader's, of the live rows.
    """

    inputs: Inputs
    made: dict[str, torch.Tensor]
    led: dict[str, torch.Tensor]

    def owner(self, row: int, rows: int) -> int:
        """The request that one of so many rows belongs to."""
        if self.inputs.width is None or rows == self.inputs.batch_size:
            return row * self.inputs.batch_size // rows
        ends = self.inputs.num_accepted_tokens.cumsum(0)  # type: ignore[attr-defined]
        return int((ends <= row).sum())


def first_far(
    meetings: Sequence[Meeting], far: Callable[[Meeting], Mismatch | None]
) -> Mismatch | None:
    """The first meeting at which the two runs are too far apart, which ``far`` says.

    Where a step meets more than once, the mismatch says which time it was.
    """
    for step, meeting in enumerate(meetings):
        wrong = far(meeting)
        if wrong is not None:
            which = f" of step {step}" if len(meetings) > 1 else ""
            return replace(wrong, field=f"{wrong.field}{which}")
    return None


class Lockstep:
    """Watches the forwards of a target, and has them follow one another on demand.

    Outside of ``lead`` and ``follow`` a watched forward does what it always did, also in captures.
    """

    def __init__(self) -> None:
        self._pass: Callable[[Any, Any], Any] = _pass_by
        self._led: list[dict[str, torch.Tensor]] = []

    def watch(self, target: CaptureTarget) -> CaptureTarget:
        """The same target, its forwards watched."""
        watched = {mode: self.watched(forward) for mode, forward in target.forwards.items()}
        return replace(target, forwards=watched)

    @contextmanager
    def lead(self) -> Iterator[None]:
        """Keep what the forwards make in the block."""
        self._led = []
        with self._passing(self._keep):
            yield

    @contextmanager
    def follow(self) -> Iterator[list[Meeting]]:
        """Have the forwards in the block follow those of the last ``lead``; gives the meetings."""
        meetings: list[Meeting] = []

        def meet(inputs: Any, output: Any) -> Any:
            if not isinstance(output, Output):
                return output  # the runner says what is wrong with it
            led, made = self._led[len(meetings)], output.tensors()
            led = {name: rows[: len(made.get(name, rows))] for name, rows in led.items()}
            meetings.append(Meeting(inputs, made, led))
            return replace(output, **{name: led[name] for name in led.keys() & made.keys()})

        with self._passing(meet):
            yield meetings

    def watched(self, forward: Any) -> Any:
        """A forward, or each of several, that does the same and is watched."""
        if isinstance(forward, Sequence):
            return tuple(self.watched(one) for one in forward)

        def watching(inputs: Any) -> Any:
            return self._pass(inputs, forward(inputs))

        watching.__qualname__ = name_of(forward)  # records speak of the user's forward
        return watching

    @contextmanager
    def _passing(self, way: Callable[[Any, Any], Any]) -> Iterator[None]:
        self._pass = way
        try:
            yield
        finally:
            self._pass = _pass_by

    def _keep(self, _inputs: Any, output: Any) -> Any:
        if isinstance(output, Output):
            self._led.append(output.clone().tensors())
        return output


def _pass_by(_inputs: Any, output: Any) -> Any:
    return output
