"""Classes of padding bugs, and the findings that report them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from graphkit.audit.audit_log import Check
from graphkit.audit.pads.state_writes import Write
from graphkit.records import Mismatch, count_of, distinct_text


class Bug(Enum):
    """A class of bug. The value is the advice."""

    LEAKING_PAD_ROW = (
        "Compute every row from that row alone: no mean, maximum, norm or scale over the batch. "
        "Mask scores, not products: 0 * NaN is NaN."
    )
    WRITE_OUTSIDE_LIVE_SLOTS = (
        "Write only to the slots of inputs.out_cache_loc, which is 0 in pad rows."
    )
    STALE_ROWS_OF_A_LARGER_BATCH = (
        "A value outlives its replay. Fill the tail of your own buffers, or declare them as input "
        "fields, which every replay pads."
    )
    ROWS_DEPEND_ON_BATCH_ORDER = "Compute a row from its inputs, not from its index in the batch."
    SIZES_INTERFERE = (
        "Graphs of two sizes share memory that one of them reads before it writes, such as a "
        "workspace or a counter. Initialise it inside the graph."
    )
    NONDETERMINISTIC_REPLAY = (
        "Declare everything that a step changes as mutable_state, and use deterministic kernels."
    )
    NONDETERMINISTIC_ROUNDING = (
        "Nothing to change if outputs need not be equal bit for bit: the step adds in changing "
        "order, as atomic additions do. Use deterministic kernels if they must."
    )
    ROUNDING_DEPENDS_ON_OTHER_ROWS = (
        "Nothing to change if outputs need not be equal bit for bit: kernels that split their work "
        "by the rows of the batch, such as grouped matrix products, round differently. Use a "
        "batch-invariant kernel if they must."
    )

    @property
    def severity(self) -> str:
        """``error``, or ``note`` for a difference within the rounding of the step."""
        notes = Bug.NONDETERMINISTIC_ROUNDING, Bug.ROUNDING_DEPENDS_ON_OTHER_ROWS
        return "note" if self in notes else "error"

    @property
    def within_rounding(self) -> Bug:
        """The class of a difference that rounding explains."""
        if self is Bug.NONDETERMINISTIC_REPLAY:
            return Bug.NONDETERMINISTIC_ROUNDING
        return Bug.ROUNDING_DEPENDS_ON_OTHER_ROWS

    @property
    def kind(self) -> str:
        """Name of the class as text, such as ``leaking pad row``."""
        return self.name.lower().replace("_", " ")


@dataclass(frozen=True, slots=True)
class WrongReplay:
    """A replay that went wrong.

    Attributes:
        bug: Class of bug that explains it.
        variation: What was varied, such as ``with copies of row 0 in pad rows``.
        live: Number of live requests.
        error: The wrong output or write.
        consequence: A further sentence; may be empty.
    """

    bug: Bug
    variation: str
    live: int
    error: Mismatch | Write
    consequence: str = ""


def report_wrong_replays(check: Check, replays: Sequence[WrongReplay]) -> None:
    """Report one finding for each class of bug and each state tensor that is written."""
    groups: dict[tuple[Bug, str], list[WrongReplay]] = {}
    for replay in replays:
        name = replay.error.name if isinstance(replay.error, Write) else ""
        groups.setdefault((replay.bug, name), []).append(replay)
    for (bug, name), (first, *others) in groups.items():
        text, facts = _text_and_facts(first)
        more = f" {count_of(len(others), 'more replay')} went wrong like this." if others else ""
        text = f"{text}{first.consequence}{more}"
        facts |= {"severity": bug.severity, "cause": name or "output"}
        check.report(bug.kind, text, advice=bug.value, **facts)


def _text_and_facts(replay: WrongReplay) -> tuple[str, dict[str, Any]]:
    error, variation, live = replay.error, replay.variation, replay.live
    if isinstance(error, Write):
        text = (
            f"row {error.row} of state `{error.name}` changes from {error.before} to {error.after} "
            f"{variation}, but belongs to no request of the batch "
            f"({count_of(live, 'live request')})."
        )
        facts = {"field": error.name, "before": error.before, "after": error.after}
        return text, {**facts, "row": error.row}
    before, after = distinct_text(error.expected, error.got)
    text = (
        f"row {error.row} of {error.field} (request {error.request} of {live}) is {after} instead "
        f"of {before} {variation}."
    )
    facts = {"field": error.field, "before": before, "after": after}
    return text, {**facts, "row": error.row, "request": error.request}
