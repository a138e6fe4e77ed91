"""Search for pad rows and earlier batches that affect live rows or declared state.

The audit replays each live batch many times at one captured size, always from the same state, with
different contents of its pad rows, after different batches, and in different orders. Live rows must
be equal; a difference within the rounding of the step is a note. Each replay may write only the
state rows of its batch and the reserved ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from graphkit.audit.audit_log import AuditLog, Check, requests_text, row_facts, row_text
from graphkit.audit.finding_kinds import FindingKind
from graphkit.audit.padding_cause import Cause
from graphkit.audit.pads.live_batch import LiveBatch, WrongReplay
from graphkit.audit.pads.sample_batches import SampleBatches
from graphkit.audit.pads.state_writes import Write
from graphkit.audit.runs import live_sizes
from graphkit.records import count_of
from graphkit.records.audit import Audit
from graphkit.runners import Runner
from graphkit.runners.targets import CaptureTarget


def audit_pads(target: CaptureTarget, runner: Runner[Any, Any], log: AuditLog) -> None:
    """Report pad rows and earlier batches that affect live rows or declared state.

    Restores state and random numbers. Holds a copy of the target's ``mutable_state`` meanwhile;
    writes to other memory are not found.

    Raises:
        ReplayError: The runner is not captured.
    """
    with SampleBatches(target, runner) as samples:
        for size in runner.table:
            with log.check(Audit.PADS, runner.mode.name, size) as check:
                sizes = live_sizes(runner.table, size)
                batches = [LiveBatch(samples, size, live, log.tolerance) for live in sizes]
                _report(check, [wrong for b in batches for wrong in b.wrong_replays()], samples)
                replays = count_of(sum(batch.replays for batch in batches), "replay")
                check.text = (
                    f"{replays} of batches of {requests_text(sizes)}: varied pads, order and "
                    "previous batches"
                )


def _report(check: Check, replays: Sequence[WrongReplay], samples: SampleBatches) -> None:
    """Report one finding for each cause and each state tensor that is written."""
    groups: dict[tuple[FindingKind, str], list[WrongReplay]] = {}
    for replay in replays:
        name = replay.error.name if isinstance(replay.error, Write) else ""
        groups.setdefault((replay.kind, name), []).append(replay)
    by_cause: dict[tuple[FindingKind, str], tuple[Cause, list[WrongReplay]]] = {}
    for (_, name), group in groups.items():
        cause = group[0].variation.find_cause(group[0].kind)
        by_cause.setdefault((cause.kind, name), (cause, []))[1].extend(group)
    for (kind, name), (cause, (first, *others)) in by_cause.items():
        text, facts = _text_and_facts(first)
        more = f" {count_of(len(others), 'more replay')} went wrong like this." if others else ""
        facts |= {"cause": name or "output"}
        facts |= cause.facts(samples.runner, check.batch_size, samples.weights)
        check.report(kind, f"{text}{cause.text}{more}", **facts)


def _text_and_facts(replay: WrongReplay) -> tuple[str, dict[str, Any]]:
    error, text, live = replay.error, replay.variation.text, replay.variation.runs.batch.batch_size
    if isinstance(error, Write):
        text = (
            f"row {error.row} of state `{error.name}` changes from {error.before} to {error.after} "
            f"{text}, but belongs to no request of the batch ({count_of(live, 'live request')})."
        )
        facts = {"field": error.name, "before": error.before, "after": error.after}
        return text, {**facts, "row": error.row}
    facts = {"field": error.field, **row_facts(error)}
    text = f"{row_text(error, live)} is {facts['after']} instead of {facts['before']} {text}."
    if error.distance:
        text += (
            f" The distance is {error.distance}; the padded and the unpadded step differ by "
            f"{replay.natural_ulps:.3g} ulp."
        )
    return text, facts
