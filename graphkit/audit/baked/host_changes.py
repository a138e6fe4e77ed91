"""What the host may change between two replays: one thing at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from graphkit.audit.baked.recaptures import BatchOf, Recaptures
from graphkit.errors import TargetError
from graphkit.graphs.walk.recorder_walk import repr_without_address
from graphkit.runners import Runner
from graphkit.targets import CaptureTarget


@dataclass(frozen=True, slots=True)
class HostChange:
    """One thing that the host may change between two replays.

    Attributes:
        name: What it is.
        before, after: Its values, for people.
        make: Makes the change, and gives the batch of a size that captures then see.
        undo: Takes it back.
    """

    name: str
    before: str
    after: str
    make: Callable[[], BatchOf]
    undo: Callable[[], None]


def begin(target: CaptureTarget) -> None:
    """Give everything that is declared to change its first value.

    Raises:
        TargetError: Something in ``dynamic`` has fewer than two values.
    """
    for name, (setter, values) in target.host_values.items():
        if len(values) < 2:
            raise TargetError(
                f"target {target.name!r}: dynamic {name!r} has {len(values)} values, so there is "
                "no change to look at. Give it two or more."
            )
        setter(values[0])


def changes_of(
    target: CaptureTarget, runner: Runner[Any], recaptures: Recaptures
) -> Iterator[HostChange]:
    """Another batch, fewer live requests, and each declared value after the first."""
    yield HostChange(
        "batch contents", "one batch", "another", lambda: recaptures.batch_of(2), _nothing
    )
    if runner.table.largest > 1:
        few = recaptures.batch_of(1, live=1)
        yield HostChange("live requests", "all", "1", lambda: few, _nothing)
    for name, (setter, values) in target.host_values.items():
        for value in values[1:]:
            yield _declared(name, setter, values[0], value, recaptures)


def _declared(
    name: str, setter: Callable[[Any], None], before: Any, after: Any, recaptures: Recaptures
) -> HostChange:
    def make() -> BatchOf:
        setter(after)
        return recaptures.batch_of(seed=1)

    return HostChange(name, _shown(before), _shown(after), make, lambda: setter(before))


def _shown(value: Any) -> str:
    """A value in one line, without its address: reports are the same from run to run."""
    return " ".join(repr_without_address(value).split())


def _nothing() -> None:
    pass
