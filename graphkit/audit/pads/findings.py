"""Wrong replays of the audit of pads, and the findings that report them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from graphkit.audit.audit_log import Check
from graphkit.audit.bugs import Bug
from graphkit.audit.padding_cause import Cause, Weights
from graphkit.audit.pads.state_writes import Write
from graphkit.records import Mismatch, count_of, distinct_text
from graphkit.runners import Runner


@dataclass(frozen=True, slots=True)
class WrongReplay:
    """A replay that went wrong.

    Attributes:
        bug: Class of bug that the variation shows.
        variation: What was varied, such as ``with copies of row 0 in pad rows``.
        live: Number of live requests.
        error: The wrong output or write.
        find_cause: Returns the cause, from further runs of the batch.
        consequence: A further sentence; may be empty.
    """

    bug: Bug
    variation: str
    live: int
    error: Mismatch | Write
    find_cause: Callable[[], Cause]
    consequence: str = ""


def report_wrong_replays(
    check: Check, replays: Sequence[WrongReplay], runner: Runner[Any, Any], weights: Weights
) -> None:
    """Report one finding for each cause and each state tensor that is written.

    Args:
        check: The check of one captured size.
        replays: The wrong replays at that size.
        runner: Captured.
        weights: The model, or its weights by name.
    """
    groups: dict[tuple[Bug, str], list[WrongReplay]] = {}
    for replay in replays:
        name = replay.error.name if isinstance(replay.error, Write) else ""
        groups.setdefault((replay.bug, name), []).append(replay)
    found: dict[tuple[Bug, str], tuple[Cause, list[WrongReplay]]] = {}
    for (_, name), group in groups.items():
        cause = group[0].find_cause()
        found.setdefault((cause.bug, name), (cause, []))[1].extend(group)
    for (bug, name), (cause, (first, *others)) in found.items():
        text, facts = _text_and_facts(first)
        more = f" {count_of(len(others), 'more replay')} went wrong like this." if others else ""
        text = f"{text}{first.consequence}{cause.text}{more}"
        facts |= {"severity": bug.severity, "cause": name or "output"}
        facts |= cause.facts(runner, check.batch_size, weights)
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
