"""Changes that the host may make between two replays, as a target declares them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from graphkit.audit.frozen_values.undeclared import changed_names
from graphkit.audit.recaptures import Change, DrawBatch
from graphkit.errors import TargetError
from graphkit.graphs.walk.recorder_walk import repr_without_address
from graphkit.records import count_of
from graphkit.runners import Runner
from graphkit.runners.targets import CaptureTarget


@dataclass(frozen=True, slots=True)
class HostChange:
    """One change that the host may make between two replays.

    Attributes:
        name: What changes, for summaries.
        subject: The same as the object of a sentence.
        before, after: Text of the two values.
        change: The change.
        paths: Numbers, lists and sets of the forward that it changes.
    """

    name: str
    subject: str
    before: str
    after: str
    change: Change
    paths: tuple[str, ...] = ()


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


def sample_batches(
    target: CaptureTarget, runner: Runner[Any, Any], seed: int, live: int | None = None
) -> DrawBatch:
    """Return a function that draws the batch of a size, of at most ``live`` requests."""
    return lambda size: target.batch(runner.mode, min(live or size, size), seed)


def host_changes(target: CaptureTarget, runner: Runner[Any, Any]) -> Iterator[HostChange]:
    """Yield another batch, fewer live requests, and each declared value after the first."""
    yield HostChange(
        name="batch contents",
        subject="the batch contents",
        before="one batch",
        after="another",
        change=Change(draw=sample_batches(target, runner, seed=2)),
    )
    if runner.table.largest > 1:
        yield HostChange(
            name="live requests",
            subject="the number of live requests",
            before="a full batch",
            after="1 request",
            change=Change(draw=sample_batches(target, runner, seed=1, live=1)),
        )
    for name, (setter, values) in target.host_values.items():
        for value in values[1:]:
            yield HostChange(
                name,
                f"`{name}`",
                _one_line(values[0]),
                _one_line(value),
                Change(partial(_declared, setter, values[0], value)),
                changed_names(target.forwards[runner.mode], setter, values[0], value),
            )


@contextmanager
def _declared(setter: Callable[[Any], object], before: Any, after: Any) -> Iterator[None]:
    try:
        setter(after)
        yield
    finally:
        setter(before)


def _one_line(value: Any) -> str:
    return " ".join(repr_without_address(value).split())
