"""Findings about replays that differ from the same step without a graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from graphkit.audit.audit_log import Check
from graphkit.audit.finding_kinds import FindingKind
from graphkit.audit.padding_cause import Cause, padding_cause
from graphkit.audit.runs import EqualStateRuns
from graphkit.audit.runs.forward_trace import Weights
from graphkit.audit.shadow.divergence import first_divergence
from graphkit.records import Finding, Mismatch, Node, count_of
from graphkit.records.audit import Audit
from graphkit.runners import Runner

_REPEATED = "in a repeated run without a graph", "in the first one"
_SIDES = {
    FindingKind.GRAPH_BUG: ("from the graph", "without it"),
    FindingKind.NONDETERMINISTIC_STEP: _REPEATED,
    FindingKind.NONDETERMINISTIC_ROUNDING: _REPEATED,
}
"""What the two runs are that differ, by the kind of finding."""
_PADDING = "with pads", "without them"
"""What they are by all other kinds."""


class ShadowFindings:
    """Reports what comparisons of replays find, the first of each kind, size and output field."""

    def __init__(self, runner: Runner[Any, Any], weights: Weights, *, bisect: bool) -> None:
        self._runner, self._weights, self._bisect = runner, weights, bisect
        self._check = Check(Audit.SHADOW, runner.mode.name, 0)
        self._reported: set[tuple[str, int, str]] = set()

    @property
    def all(self) -> list[Finding]:
        """Findings so far."""
        return self._check.findings

    def report_failure(self, runs: EqualStateRuns, error: Exception) -> None:
        """Report a batch that cannot be compared."""
        text = f"the comparison of a replay of {_live(runs)} failed: {_described(error)}"
        self._report(FindingKind.SHADOW_FAILED, runs, "", text)

    def report_frozen(self, runs: EqualStateRuns) -> bool:
        """Report what has changed on the host since capture and the graph keeps, if anything."""
        frozen = self._runner.frozen_values(runs.padded_batch_size)
        for value in frozen:
            name = value.names[0]
            if self._is_new(value.kind, runs, name):
                place = self._place(runs, name)
                self.all.append(replace(value, audit=Audit.SHADOW, **place))
        return bool(frozen)

    def report_wrong_state(self, runs: EqualStateRuns, name: str) -> None:
        """Report state that a replay leaves wrong."""
        text = (
            f"the graph leaves different values in `{name}` than the same step without a graph "
            f"({_live(runs)})."
        )
        self._report(FindingKind.GRAPH_BUG, runs, name, text)

    def report_row(
        self,
        kind: FindingKind,
        runs: EqualStateRuns,
        wrong: Mismatch,
        more: str = "",
        **facts: Any,
    ) -> None:
        """Report a row that differs between two runs of a batch, with more text and facts."""
        if self._is_new(kind, runs, wrong.field):
            text, facts["node"] = self._diverging(kind, runs, facts.get("node"))
            facts |= self._place(runs, wrong.field)
            live, sides = runs.batch.batch_size, _SIDES.get(kind, _PADDING)
            self._check.report_row(kind, wrong, live, sides, more + text, **facts)

    def report_unstable(self, runs: EqualStateRuns, unstable: Mismatch) -> None:
        """Report a step that differs beyond rounding when it is repeated without a graph."""
        kind, is_alone = FindingKind.NONDETERMINISTIC_STEP, self._runner.group is None

        def find_cause() -> Cause:
            return Cause(kind, runs.first_unstable_node(self._weights) if is_alone else None)

        self._report_cause(kind, runs, unstable, find_cause)

    def report_padding(
        self, runs: EqualStateRuns, wrong: Mismatch, kind: FindingKind | None = None
    ) -> None:
        """Report a live row that padding changes; ``kind`` as for ``padding_cause``."""
        find_cause = partial(padding_cause, runs, self._weights, kind)
        self._report_cause(kind or FindingKind.LEAKING_PAD_ROW, runs, wrong, find_cause)

    def _report_cause(
        self,
        kind: FindingKind,
        runs: EqualStateRuns,
        wrong: Mismatch,
        find_cause: Callable[[], Cause],
    ) -> None:
        """Report a row once, with its cause; ``kind`` if the search for the cause fails."""
        if not self._is_new(f"cause of {kind}", runs, wrong.field):
            return
        more = ""
        try:
            cause = find_cause()
        except Exception as error:  # the finding is reported anyway
            cause = Cause(kind)
            more = f" The search for the node failed: {_described(error)}"
        facts = cause.facts(self._runner, runs.padded_batch_size, self._weights)
        self.report_row(cause.kind, runs, wrong, f"{cause.text}{more}", **facts)

    def _report(self, kind: FindingKind, runs: EqualStateRuns, field: str, text: str) -> None:
        """Report a finding once, with the first node that differs if the graph is bisected."""
        if self._is_new(kind, runs, field):
            more, node = self._diverging(kind, runs)
            self._check.report(kind, text + more, node=node, **self._place(runs, field))

    def _diverging(
        self, kind: FindingKind, runs: EqualStateRuns, node: Node | None = None
    ) -> tuple[str, Node | None]:
        """Return how a wrong graph differs from a new capture, and the node."""
        if kind is not FindingKind.GRAPH_BUG or not self._bisect:
            return "", node
        try:
            text, node = first_divergence(runs, self._weights)
        except Exception as error:  # the finding is reported anyway
            text, node = f"A new capture fails: {_described(error)}", None
        return f" {text}", node

    def _place(self, runs: EqualStateRuns, field: str) -> dict[str, Any]:
        cause = field.partition(" of ")[0]
        return {"field": field, "cause": cause, "batch_size": runs.padded_batch_size}

    def _is_new(self, kind: str, runs: EqualStateRuns, field: str) -> bool:
        key = kind, runs.padded_batch_size, field
        is_new = key not in self._reported
        self._reported.add(key)
        return is_new


def _live(runs: EqualStateRuns) -> str:
    return count_of(runs.batch.batch_size, "live request")


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
