"""Comparison of replays in use with the same step without a graph."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Self

import torch

from graphkit.audit.audit_log import Check, row_facts, row_text
from graphkit.audit.bugs import Bug
from graphkit.audit.padding_cause import Cause, padding_cause
from graphkit.audit.row_axes import changed_state
from graphkit.audit.shadow.divergence import Divergence, first_divergence
from graphkit.config import require_int, require_type
from graphkit.graphs import StateSnapshot
from graphkit.records import Finding, Mismatch, count_of
from graphkit.runners import Runner
from graphkit.runners.observe import ObservedReplay
from graphkit.runners.reachable_objects import ReachableObjects
from graphkit.verify import EqualStateRuns, check_tolerance
from graphkit.verify.differences import Tensors
from graphkit.verify.forward_trace import Weights

_GRAPH = (
    "The graph kept a value or an address that has changed since. Watch with bisect=True, or run "
    "the other audits."
)
_FROZEN = "Read it from a tensor that every replay refreshes, or capture again after each change."
_FAILED = "Run the batch with runner.fall_back, and fix the error that it raises."


@dataclass(frozen=True, slots=True)
class _Replay:
    """A replay that is compared.

    Attributes:
        runs: Runs its batch again from the state before it.
        output: Copies of the live rows that it computed.
        after: The state after it.
    """

    runs: EqualStateRuns
    output: Tensors
    after: StateSnapshot

    @property
    def live(self) -> int:
        """Number of live requests."""
        return int(self.runs.batch.batch_size)

    @property
    def size(self) -> int:
        """Captured size."""
        return self.runs.padded_batch_size


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
        tolerance: Multiple of the usual rounding that is allowed, see ``verify.Rounding``.
        bisect: Whether to capture the size of a wrong graph again, next to it, and find the first
            node that differs; and, if a host number has changed since capture, whether the graph
            keeps it. Takes as long as a capture, and runs the forward.

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
    ) -> None:
        require_type("ShadowWatch", "runner", runner, Runner, "a runner")
        require_int("ShadowWatch", "every", every)
        check_tolerance(tolerance)
        self.compared, self._tolerance = 0, tolerance
        self._runner, self._every, self._weights, self._bisect = runner, every, weights, bisect
        self._check = Check("shadow", runner.mode.name, 0)
        self._reported: set[tuple[str, int, str]] = set()
        self._count, self._exits = 0, ExitStack()

    @property
    def findings(self) -> list[Finding]:
        """Findings so far: the first of each kind, captured size and output field."""
        return self._check.findings

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
        runs = EqualStateRuns(
            self._runner, batch, observed.padded_batch_size, before, self._tolerance
        )
        replay = _Replay(runs, output.clone().tensors(), self._snapshot(objects))
        try:
            self._compare(replay)
        except Exception as error:  # callers of replay must not see it
            text = (
                f"the comparison of a replay of {count_of(replay.live, 'live request')} "
                f"failed: {type(error).__name__}: {error}"
            )
            self._report("shadow failed", replay, "", text, _FAILED, severity="warning")
        finally:
            replay.after.restore()
            _overwrite(output.tensors(), replay.output)  # a bisection replays the graph again
        return output

    def _snapshot(self, objects: ReachableObjects | None = None) -> StateSnapshot:
        restore_host = None if objects is None else objects.restore
        return StateSnapshot(self._runner.mutable_state, self._runner.device, restore_host)

    def _compare(self, replay: _Replay) -> None:
        self.compared += 1
        if self._bisect and self._report_frozen(replay):
            return  # a run without a graph uses other values
        padded = replay.runs.padded()
        state = self._changed_state(replay.after, replay)
        graph = replay.runs.graph_difference(padded, replay.output)
        if (graph is not None or state) and not self._judge_graph(replay, padded, state):
            return  # the unpadded run would differ as well
        padding = replay.runs.padding_difference()
        if padding is not None:
            runs, bug = ("with pads", "without them"), Bug.LEAKING_PAD_ROW
            self._report_cause(replay, padding, runs, bug, self._why_padding)

    def _report_frozen(self, replay: _Replay) -> bool:
        """Report host numbers that have changed since capture and that the graph keeps."""
        found = self._runner.frozen_values(replay.size)
        for value in found:
            values = {"before": value.before, "after": value.after, "names": (value.name,)}
            facts = {**values, "argument": value.argument, "node": value.node}
            self._report("baked value", replay, value.name, value.text, _FROZEN, **facts)
        return bool(found)

    def _judge_graph(self, replay: _Replay, padded: Tensors, state: list[str]) -> bool:
        """Report why a replay differs from its padded run.

        Returns:
            Whether the step can be compared, see ``EqualStateRuns.judge_graph``.
        """
        left = self._snapshot()
        verdict = replay.runs.judge_graph(padded, replay.output)
        repeated = "in a repeated run without a graph", "in the first one"
        if not verdict.is_comparable and verdict.unstable is not None:
            bug = Bug.NONDETERMINISTIC_STEP
            self._report_cause(replay, verdict.unstable, repeated, bug, self._why_unstable)
        elif verdict.wrong is not None:
            names = "from the graph", "without it"
            self._report_row("graph bug", replay, verdict.wrong, names, _GRAPH)
        elif verdict.unstable is not None:
            wrong, bug = verdict.unstable, Bug.NONDETERMINISTIC_ROUNDING
            self._report_row(bug.kind, replay, wrong, repeated, bug.value, severity=bug.severity)
        else:
            unstable = self._changed_state(left, replay)
            changed = [name for name in state if name not in unstable]
            if changed:
                text = (
                    f"the graph leaves different values in `{changed[0]}` than the same step "
                    f"without a graph ({count_of(replay.live, 'live request')})."
                )
                self._report("graph bug", replay, changed[0], text, _GRAPH)
        return verdict.is_comparable

    def _changed_state(self, snapshot: StateSnapshot, replay: _Replay) -> list[str]:
        return changed_state(snapshot, replay.runs.batch, self._runner.sizes.page_size)

    def _why_padding(self, runs: EqualStateRuns) -> Cause:
        return padding_cause(runs, self._weights)

    def _why_unstable(self, runs: EqualStateRuns) -> Cause:
        is_alone = self._runner.group is None
        first = runs.first_unstable_node(self._weights) if is_alone else None
        return Cause(Bug.NONDETERMINISTIC_STEP, first)

    def _report_cause(
        self,
        replay: _Replay,
        wrong: Mismatch,
        names: tuple[str, str],
        bug: Bug,
        find: Callable[[EqualStateRuns], Cause],
    ) -> None:
        """Report a wrong row once, with its cause from further runs of the batch.

        Args:
            replay: The replay.
            wrong: The row.
            names: Names of the two runs that differ.
            bug: Class of bug if the search for the cause fails.
            find: Returns the cause.
        """
        key = f"cause of {bug.kind}", replay.size, wrong.field
        if key in self._reported:
            return
        self._reported.add(key)
        more = ""
        try:
            cause = find(replay.runs)
        except Exception as error:  # the finding is reported anyway
            cause = Cause(bug)
            more = f" The search for the node failed: {type(error).__name__}: {error}"
        facts = cause.facts(self._runner, replay.size, self._weights)
        kind, advice, more = cause.bug.kind, cause.bug.value, f"{cause.text}{more}"
        self._report_row(kind, replay, wrong, names, advice, more=more, **facts)

    def _report_row(
        self,
        kind: str,
        replay: _Replay,
        wrong: Mismatch,
        runs: tuple[str, str],
        advice: str,
        more: str = "",
        **facts: Any,
    ) -> None:
        facts |= row_facts(wrong)
        distance = f" ({wrong.distance})" if wrong.distance else ""
        text = (
            f"{row_text(wrong, replay.live)} is {facts['after']} {runs[0]} and {facts['before']} "
            f"{runs[1]}{distance}.{more}"
        )
        self._report(kind, replay, wrong.field, text, advice, **facts)

    def _report(
        self, kind: str, replay: _Replay, field: str, text: str, advice: str, **facts: Any
    ) -> None:
        """Report a finding once, with the first node that differs if the graph is bisected."""
        if (kind, replay.size, field) in self._reported:
            return
        self._reported.add((kind, replay.size, field))
        if kind == "graph bug" and self._bisect:
            found = self._bisected(replay)
            text, facts["node"] = f"{text} {found.text}", found.node
        facts |= {"batch_size": replay.size, "field": field, "cause": field.partition(" of ")[0]}
        self._check.report(kind, text, advice=advice, **facts)

    def _bisected(self, replay: _Replay) -> Divergence:
        try:
            return first_divergence(replay.runs, self._weights)
        except Exception as error:  # the finding is reported anyway
            return Divergence(f"A new capture fails: {type(error).__name__}: {error}")


def _overwrite(output: Tensors, rows: Tensors) -> None:
    with torch.inference_mode():
        for name, tensor in output.items():
            tensor.copy_(rows[name])
