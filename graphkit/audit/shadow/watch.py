"""Comparison of replays in use with the same step without a graph, and findings about them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, Self

import torch

from graphkit.audit.audit_log import AuditLog, Check, requests_text
from graphkit.audit.finding_kinds import FindingKind
from graphkit.audit.host_objects.reachable_objects import ReachableObjects
from graphkit.audit.padding_cause import Cause, padding_cause
from graphkit.audit.row_axes import changed_state
from graphkit.audit.runs.equal_state_runs import EqualStateRuns, live_sizes
from graphkit.audit.runs.forward_trace import Weights
from graphkit.audit.shadow.divergence import first_divergence
from graphkit.config import require_int, require_type
from graphkit.graphs import StateSnapshot
from graphkit.records import Finding, Mismatch, Node, count_of
from graphkit.records.audit import Audit
from graphkit.runners import Runner
from graphkit.runners.comparison import check_tolerance
from graphkit.runners.comparison.differences import Tensors
from graphkit.runners.comparison.step_comparison import SEED, restorable_state
from graphkit.runners.observe import ObservedReplay
from graphkit.runners.targets import CaptureTarget

_REPEATED = "in a repeated run without a graph", "in the first one"
_SIDES = {
    FindingKind.GRAPH_BUG: ("from the graph", "without it"),
    FindingKind.NONDETERMINISTIC_STEP: _REPEATED,
    FindingKind.NONDETERMINISTIC_ROUNDING: _REPEATED,
}
"""What the two runs are that differ, by the kind of finding."""
_PADDING = "with pads", "without them"
"""What they are by all other kinds."""


class ShadowWatch:
    """Compares every n-th replay of a captured runner with the same step without a graph.

    A context manager: it watches while its block runs. The batch of such a replay runs again,
    padded and unpadded. If the replay differs from the padded run in any bit, the graph is wrong;
    if the padded run differs from the unpadded one beyond rounding, padding is wrong. Then, once
    for each size and output field, the forward runs several times more to find the node.

    Callers get the output of the graph. State, random numbers and the objects that the forward
    refers to are restored to what the graph left. A replay that is compared takes as long as
    several forwards, waits for the device, and needs up to three copies of the declared state.
    Other replays are only counted.

    Args:
        runner: Captured. ``replay``, ``run`` and staged batches are watched.
        every: Compare every so many replays.
        weights: The model, or its weights by name, to name graph nodes by.
        tolerance: Multiple of the usual rounding that is allowed, see ``Rounding``.
        bisect: Whether to capture the size of a wrong graph again, next to it, and find the first
            node that differs; and, if a host number has changed since capture, whether the graph
            keeps it. Takes as long as a capture, and runs the forward.
        equal_bits: Whether to report rows whose bits differ within rounding when they run without
            pads, as a note. Takes one more run of the forward.

    Attributes:
        compared: Number of replays compared so far.

    Raises:
        ConfigError: ``runner`` is not a runner, ``every`` is not an int of at least 1, or the
            tolerance is not a number above 0.
        ReplayError: When the block begins: the runner is not ``captured``.
    """

    def __init__(
        self,
        runner: Runner[Any, Any],
        *,
        every: int = 100,
        weights: Weights = None,
        bisect: bool = False,
        tolerance: float = 1.0,
        equal_bits: bool = False,
    ) -> None:
        require_type("ShadowWatch", "runner", runner, Runner, "a runner")
        require_int("ShadowWatch", "every", every)
        check_tolerance(tolerance)
        self.compared, self._tolerance = 0, tolerance
        self._compares_bits = equal_bits
        self._runner, self._every, self._bisect = runner, every, bisect
        self._findings = _Findings(runner, weights, bisect=bisect)
        self._count, self._exits = 0, ExitStack()

    @property
    def findings(self) -> list[Finding]:
        """Findings so far: the first of each kind, captured size and output field."""
        return self._findings.all

    def __enter__(self) -> Self:
        self._exits.enter_context(self._runner.observe(self._observe))
        return self

    def __exit__(self, *exc: object) -> None:
        self._exits.close()

    def _observe(self, observed: ObservedReplay[Any]) -> Any:
        self._count += 1
        if self._count % self._every:
            return observed()
        batch = observed.read_batch()
        objects = ReachableObjects({self._runner.step.name: self._runner.step.forward})
        before = self._snapshot(objects)
        output = observed()
        size, replayed = observed.padded_batch_size, output.clone().tensors()
        after = self._snapshot(objects)
        runs = EqualStateRuns(self._runner, batch, size, before, tolerance=self._tolerance)
        try:
            self._compare(runs, replayed, after)
        except Exception as error:  # callers of replay must not see it
            self._findings.report_failure(runs, error)
        finally:
            after.restore()
            with torch.inference_mode():
                for name, tensor in output.tensors().items():
                    tensor.copy_(replayed[name])  # a bisection replays the graph again
        return output

    def _snapshot(self, objects: ReachableObjects | None = None) -> StateSnapshot:
        restore_host = None if objects is None else objects.restore
        return StateSnapshot(self._runner.mutable_state, self._runner.device, restore_host)

    def _compare(self, runs: EqualStateRuns, replayed: Tensors, after: StateSnapshot) -> None:
        self.compared += 1
        if self._bisect and self._findings.report_frozen(runs):
            return  # a run without a graph uses other values
        padded = runs.padded()
        state = self._changed_state(after, runs)
        graph = runs.graph_difference(padded, replayed)
        if (graph is not None or state) and not self._judge_graph(runs, padded, replayed, state):
            return  # the unpadded run would differ as well
        padding, kind = runs.padding_difference(), None
        if padding is None and self._compares_bits:
            padding, kind = runs.padding_difference(0.0), FindingKind.ROUNDING_DEPENDS_ON_OTHER_ROWS
        if padding is not None:
            self._findings.report_padding(runs, padding, kind)

    def _judge_graph(
        self, runs: EqualStateRuns, padded: Tensors, replayed: Tensors, state: Sequence[str]
    ) -> bool:
        """Report why a replay differs from its padded run.

        Returns:
            Whether the step can be compared, see ``EqualStateRuns.judge_graph``.
        """
        left = self._snapshot()
        verdict = runs.judge_graph(padded, replayed)
        if not verdict.is_comparable and verdict.unstable is not None:
            self._findings.report_unstable(runs, verdict.unstable)
        elif verdict.wrong is not None:
            self._findings.report_row(FindingKind.GRAPH_BUG, runs, verdict.wrong)
        elif verdict.unstable is not None:
            kind = FindingKind.NONDETERMINISTIC_ROUNDING
            self._findings.report_row(kind, runs, verdict.unstable)
        else:
            unstable = self._changed_state(left, runs)
            changed = [name for name in state if name not in unstable]
            if changed:
                self._findings.report_wrong_state(runs, changed[0])
        return verdict.is_comparable

    def _changed_state(self, snapshot: StateSnapshot, runs: EqualStateRuns) -> list[str]:
        return changed_state(snapshot, runs.batch, self._runner.sizes.page_size)


def audit_shadow(target: CaptureTarget, runner: Runner[Any, Any], log: AuditLog) -> None:
    """Compare replays of sample batches at every size with the step without a graph."""
    for size in runner.table:
        with log.check(Audit.SHADOW, runner.mode.name, size) as check:
            watch = ShadowWatch(
                runner, every=1, weights=target.weights, bisect=True, tolerance=log.tolerance
            )
            sizes = live_sizes(runner.table, size)
            with StateSnapshot(restorable_state(runner), runner.device), watch:
                for live in sizes:
                    batch = target.batch(runner.mode, live, SEED + live)
                    runner.replay(batch, padded_batch_size=size)
            check.findings += watch.findings
            check.text = f"compared {requests_text(sizes)} with the padded and the unpadded step"


class _Findings:
    """Reports what comparisons of replays find, the first of each kind, size and output field."""

    def __init__(self, runner: Runner[Any, Any], weights: Weights, *, bisect: bool) -> None:
        self._runner, self._weights, self._bisect = runner, weights, bisect
        self._check = Check(Audit.SHADOW, runner.mode.name, 0)
        self.all: list[Finding] = self._check.findings
        self._reported: set[tuple[str, int, str]] = set()

    def report_failure(self, runs: EqualStateRuns, error: Exception) -> None:
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
        text = (
            f"the graph leaves different values in `{name}` than the same step without a graph "
            f"({_live(runs)})."
        )
        self._report(FindingKind.GRAPH_BUG, runs, name, text)

    def report_row(
        self, kind: FindingKind, runs: EqualStateRuns, wrong: Mismatch, more: str = "", **facts: Any
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
