"""What replays with other pads show, in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from graphkit.audit.audit_log import Check
from graphkit.audit.pads.state import Write
from graphkit.records import Mismatch


class Bug(Enum):
    """A class of bug. The value is what to do about it."""

    LEAKING_PAD_ROW = (
        "Compute every row from itself alone: no mean, maximum, norm or scale over the batch, and "
        "no attention to masked keys, whose NaN outlives a weight of zero."
    )
    WRITE_OUTSIDE_LIVE_SLOTS = (
        "Take slots from inputs.out_cache_loc, which is 0 in pad rows; they may write there alone."
    )
    STALE_ROWS_OF_A_LARGER_BATCH = (
        "Something outlives a replay: fill the tail of buffers of your own, or declare them as "
        "input fields, which every replay pads."
    )
    ROWS_DEPEND_ON_THEIR_PLACE = (
        "Let a row be computed from its own inputs, not from its index in the batch."
    )
    SIZES_DISTURB_EACH_OTHER = (
        "Graphs of two sizes share memory that one of them reads before it writes, such as a "
        "workspace or a counter: initialise it inside the graph."
    )
    REPLAYS_DIFFER_BY_THEMSELVES = (
        "Two replays of one batch from the same state must agree: declare everything that a step "
        "changes as state, and use no kernel whose sums depend on timing."
    )

    @property
    def kind(self) -> str:
        """The class in plain words, such as ``leaking pad row``."""
        return self.name.lower().replace("_", " ")


@dataclass(frozen=True, slots=True)
class Case:
    """A replay that went wrong.

    Attributes:
        bug: What it hints at.
        what: What was varied; empty if nothing was.
        live: Live requests.
        seen: What was wrong.
        then: What follows from that, as a sentence; may be empty.
    """

    bug: Bug
    what: str
    live: int
    seen: Mismatch | Write
    then: str = ""


def tell(check: Check, cases: Sequence[Case]) -> None:
    """Write down one finding for all cases that hint at the same bug in the same place."""
    alike: dict[tuple[Bug, str], list[Case]] = {}
    for case in cases:
        place = case.seen.name if isinstance(case.seen, Write) else ""
        alike.setdefault((case.bug, place), []).append(case)
    for (bug, _), (first, *others) in alike.items():
        more = f" {len(others)} more replays go wrong like that." if others else ""
        check.report(bug.kind, _text(first) + first.then + more, advice=bug.value, **_facts(first))


def _text(case: Case) -> str:
    place = f"with {case.live} live request{'s' if case.live > 1 else ''}"
    place = f"{place} and {case.what}" if case.what else place
    seen = case.seen
    if isinstance(seen, Write):
        return (
            f"{place}, a replay changes row {seen.row} of state {seen.name!r} from {seen.before} "
            f"to {seen.after}, which its batch does not name."
        )
    return (
        f"{place}, row {seen.row} of {seen.field}, of request {seen.request}, is {seen.got:.6g} "
        f"instead of {seen.expected:.6g}."
    )


def _facts(case: Case) -> dict[str, Any]:
    seen = case.seen
    if isinstance(seen, Write):
        return {"field": seen.name, "row": seen.row, "before": seen.before, "after": seen.after}
    return {
        "field": seen.field,
        "row": seen.row,
        "request": seen.request,
        "before": f"{seen.expected:.6g}",
        "after": f"{seen.got:.6g}",
    }
