"""Comparison of replays in use with the same step without a graph."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Self

import torch

from graphkit.audit.audit_log import AuditLog, requests_text
from graphkit.audit.finding_kinds import FindingKind
from graphkit.audit.host_objects.reachable_objects import ReachableObjects
from graphkit.audit.row_axes import changed_state
from graphkit.audit.runs import EqualStateRuns, live_sizes
from graphkit.audit.runs.forward_trace import Weights
from graphkit.audit.shadow.findings import ShadowFindings
from graphkit.config import require_int, require_type
from graphkit.graphs import StateSnapshot
from graphkit.records import Finding
from graphkit.records.audit import Audit
from graphkit.runners import Runner
from graphkit.runners.comparison import check_tolerance
from graphkit.runners.comparison.differences import Tensors
from graphkit.runners.comparison.step_comparison import SEED, restorable_state
from graphkit.runners.observe import ObservedReplay
from graphkit.runners.targets import CaptureTarget


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
        self._findings = ShadowFindings(runner, weights, bisect=bisect)
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
            _overwrite(output.tensors(), replayed)  # a bisection replays the graph again
        return output

    def _snapshot(self, objects: ReachableObjects | None = None) -> StateSnapshot:
        restore_host = None if objects is None else objects.restore
        return StateSnapshot(self._runner.mutable_state, self._runner.device, restore_host)

    def _compare(self, runs: EqualStateRuns, replayed: Tensors, after: StateSnapshot) -> None:
        """Compare a replay with runs of its batch."""
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
                runner,
                every=1,
                weights=target.weights,
                bisect=True,
                tolerance=log.tolerance,
            )
            sizes = live_sizes(runner.table, size)
            with StateSnapshot(restorable_state(runner), runner.device), watch:
                for live in sizes:
                    batch = target.batch(runner.mode, live, SEED + live)
                    runner.replay(batch, padded_batch_size=size)
            check.findings += watch.findings
            check.text = f"compared {requests_text(sizes)} with the padded and the unpadded step"


def _overwrite(output: Tensors, rows: Tensors) -> None:
    with torch.inference_mode():
        for name, tensor in output.items():
            tensor.copy_(rows[name])
