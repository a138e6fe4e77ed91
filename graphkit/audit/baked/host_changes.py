"""Changes that the host may make between two replays."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from graphkit.audit.baked.recaptures import BatchOf, Recaptures
from graphkit.errors import TargetError
from graphkit.graphs.walk.recorder_walk import repr_without_address
from graphkit.records import count_of
from graphkit.runners import Runner
from graphkit.targets import CaptureTarget


@dataclass(frozen=True, slots=True)
class HostChange:
    """One change that the host may make between two replays.

    Attributes:
        name: What changes, for summaries.
        subject: The same as the object of a sentence.
        before, after: Text of the two values.
        apply: Makes the change, and returns the function that draws the batch of each size.
        undo: Reverts the change.
    """

    name: str
    subject: str
    before: str
    after: str
    apply: Callable[[], BatchOf]
    undo: Callable[[], object]


def set_first_values(target: CaptureTarget) -> None:
    """Set every declared host value to its first value.

    Raises:
        TargetError: A host value has fewer than two values.
    """
    for name, (setter, values) in target.host_values.items():
        if len(values) < 2:
            raise TargetError(
                f"target {target.name!r}: host value {name!r} has "
                f"{count_of(len(values), 'value')}, so there is nothing to compare. Give it two "
                "or more."
            )
        setter(values[0])


def host_changes(
    target: CaptureTarget, runner: Runner[Any, Any], recaptures: Recaptures
) -> Iterator[HostChange]:
    """Yield another batch, fewer live requests, and each declared value after the first."""
    yield HostChange(
        name="batch contents",
        subject="the batch contents",
        before="one batch",
        after="another",
        apply=lambda: recaptures.batch_of(seed=2),
        undo=lambda: None,
    )
    if runner.table.largest > 1:
        yield HostChange(
            name="live requests",
            subject="the number of live requests",
            before="a full batch",
            after="1 request",
            apply=lambda: recaptures.batch_of(seed=1, live=1),
            undo=lambda: None,
        )
    for name, (setter, values) in target.host_values.items():
        for value in values[1:]:
            yield _declared_change(name, setter, values[0], value, recaptures)


def _declared_change(
    name: str, setter: Callable[[Any], None], before: Any, after: Any, recaptures: Recaptures
) -> HostChange:
    def apply() -> BatchOf:
        setter(after)
        return recaptures.batch_of(seed=1)

    return HostChange(
        name, f"`{name}`", _one_line(before), _one_line(after), apply, lambda: setter(before)
    )


def _one_line(value: Any) -> str:
    return " ".join(repr_without_address(value).split())
