"""Measure what launching each graph costs the host, and count the streams of the process.

Nothing here makes a replay wrong, so all findings are notes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch

from graphkit.audit.audit_log import AuditLog, Check
from graphkit.audit.finding_kinds import FindingKind
from graphkit.audit.launch_cost import TrivialGraphs, driver_executable, launch_us
from graphkit.graphs import CudaBackend, GraphSequence, StateSnapshot
from graphkit.graphs.streams import ONE_STREAM_ADVICE, streams_in_use
from graphkit.records import GraphRecord, count_of
from graphkit.records.audit import Audit
from graphkit.runners import Runner
from graphkit.runners.comparison.drawn_state import restorable_state
from graphkit.runners.targets import CaptureTarget

SLOW = 2.0
"""Multiple of a linear graph's launch time above which the audit reports a launch."""
LINEAR_US, LINEAR_US_PER_NODE = 10.0, 0.1
"""Upper bounds of the host time of a linear graph: 4.5 us on an H200, for nearly any length."""
_FORK_ADVICE = (
    "Capture the branches one after the other on one stream, unless running them at the same time "
    "saves the device more than the launch costs the host."
)
_NODE_ADVICE = "Move this work out of the captured forward, or into kernels."


@dataclass(frozen=True, slots=True)
class GraphShape:
    """What distinguishes a graph from kernels in one line.

    Attributes:
        num_nodes: Number of nodes, those inside of other nodes included.
        dependencies: For each of the graph's own nodes, the nodes that it waits for.
        forks, joins: Own nodes with several dependents, and with several dependencies. Several
            first nodes count as a fork.
        others: Number of nodes that are not kernels, by kind.
    """

    num_nodes: int
    dependencies: Mapping[int, Sequence[int]]
    forks: int
    joins: int
    others: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def from_record(cls, record: GraphRecord) -> Self:
        """Return the shape of a graph."""
        before: dict[int, list[int]] = {
            node.index: [] for node in record.nodes if node.parent is None
        }
        dependents: Counter[int] = Counter()
        for edge in record.edges:
            if edge.target in before:
                before[edge.target].append(edge.source)
                dependents[edge.source] += 1
        first = sum(not sources for sources in before.values())
        return cls(
            num_nodes=len(record.nodes),
            dependencies=before,
            forks=sum(count > 1 for count in dependents.values()) + (first > 1),
            joins=sum(len(sources) > 1 for sources in before.values()),
            others=Counter(node.kind for node in record.nodes if node.kind != "kernel"),
        )


@dataclass(frozen=True, slots=True)
class LaunchTimes:
    """Host time of launches, in microseconds.

    Attributes:
        own: The graph.
        linear: A linear graph of as many trivial kernels.
        branched: Trivial kernels with the dependencies of the graph.
    """

    own: float
    linear: float
    branched: float

    @property
    def is_slow(self) -> bool:
        """Whether the graph takes more than ``SLOW`` times as long as a linear one."""
        return self.own > SLOW * self.linear

    @property
    def forks_explain_most(self) -> bool:
        """Whether the dependencies alone cost more than half of the time above a linear graph."""
        return self.branched - self.linear > (self.own - self.linear) / 2


def audit_launch(_target: CaptureTarget, runner: Runner[Any, Any], log: AuditLog) -> None:
    """Report graphs whose launch takes more host time than the launch of a linear graph.

    A graph of trivial kernels with the same dependencies tells forks from other causes. The
    recorder launches nothing, so nothing is measured there. Restores declared state.
    """
    backend = runner.backend
    if not isinstance(backend, CudaBackend):
        with log.check(Audit.LAUNCH, runner.mode.name) as check:
            check.text = "not measured: the recorder launches no graph"
        return
    with torch.cuda.device(runner.device), TrivialGraphs(backend) as trivial:
        for size in runner.table:
            with log.check(Audit.LAUNCH, runner.mode.name, size) as check:
                shape = GraphShape.from_record(runner.inspect(size))
                report_launch(shape, _launch_times(runner, size, shape, trivial), check)


def report_launch(shape: GraphShape, times: LaunchTimes, check: Check) -> None:
    """Summarise a graph's launch, and report it if it is slow."""
    nodes = count_of(shape.num_nodes, "node")
    own, linear = (
        f"{us:.1f} us ({us / shape.num_nodes:.3f} per node)" for us in (times.own, times.linear)
    )
    check.text = f"{nodes} launch in {own}, a linear graph of as many in {linear}"
    if shape.forks or shape.joins:
        check.text += f"; {_branches_text(shape)}"
    if not times.is_slow:
        return
    cause, what, advice = _cause(shape, times)
    check.report(
        FindingKind.SLOW_LAUNCH,
        f"the launch of {nodes} takes {own} of host time, and the launch of a linear graph "
        f"of as many nodes {linear}: {what}.",
        cause=cause,
        advice=advice,
        before=f"{times.linear:.1f} us",
        after=f"{times.own:.1f} us",
    )


def report_launch_time(record: GraphRecord, own_us: float, check: Check) -> None:
    """Add a measured launch to the summary, and report it if it is far above a linear graph's.

    Args:
        record: The graph.
        own_us: Host time of its launch in microseconds.
        check: Its ``text`` is extended.
    """
    shape = GraphShape.from_record(record)
    nodes = count_of(shape.num_nodes, "node")
    per_node = own_us / max(shape.num_nodes, 1)
    check.text += f"; {nodes} launch in {own_us:.1f} us"
    if own_us <= SLOW * LINEAR_US or per_node <= LINEAR_US_PER_NODE:
        return
    branches = _branches_text(shape)
    check.report(
        FindingKind.SLOW_LAUNCH,
        f"the launch of {nodes} takes {own_us:.1f} us of host time, {per_node:.2f} per node; a "
        f"linear graph takes about {LINEAR_US:g}. It has {branches}.",
        advice=_FORK_ADVICE if shape.forks or shape.joins else FindingKind.SLOW_LAUNCH.advice,
        after=f"{own_us:.1f} us",
    )


def audit_streams(device: torch.device, log: AuditLog) -> None:
    """Count the streams of the process in the summary, and say how replays stay fast.

    Never a finding: which stream runs what is not visible, and the number alone costs nothing.

    Args:
        device: A CUDA device; no other has streams.
        log: Collects the findings.
    """
    if device.type != "cuda":
        return
    with log.check(Audit.LAUNCH) as check:
        used = count_of(len(streams_in_use(device)), "stream")
        check.text = f"{used} in use; {ONE_STREAM_ADVICE}"


def _launch_times(
    runner: Runner[Any, Any], size: int, shape: GraphShape, trivial: TrivialGraphs
) -> LaunchTimes:
    """Measure the launches of a captured size on a batch of pads."""
    graph = runner.graphs[size]
    graphs: Sequence[Any] = graph.graphs if isinstance(graph, GraphSequence) else (graph,)
    linear = trivial.chain(-(-shape.num_nodes // len(graphs)))
    variants = {
        "own": [driver_executable(part) for part in graphs],
        "linear": [linear] * len(graphs),
    }
    if shape.forks or shape.joins:
        variants["branched"] = [trivial.build(shape.dependencies)]

    def post_pads(variant: str) -> None:
        if variant == "own":  # its refresh reads an entry
            with runner.buffers.posted():
                pass

    with StateSnapshot(restorable_state(runner), runner.device):
        runner.backend.wait_for_replays()
        runner.step.plan_on_host(runner.buffers.view(size), size)
        times = launch_us(variants, post_pads)
    return LaunchTimes(times["own"], times["linear"], times.get("branched", times["linear"]))


def _cause(shape: GraphShape, times: LaunchTimes) -> tuple[str, str, str]:
    """Return the cause of a slow launch, a clause that explains it, and advice."""
    branched = f"trivial kernels with the same dependencies take {times.branched:.1f} us"
    if times.forks_explain_most:
        return "forks", f"{_branches_text(shape)} make it slow, as {branched}", _FORK_ADVICE
    without_forks = f"not its forks: {branched}" if shape.forks else "it has no forks"
    if shape.others:
        kinds = ", ".join(count_of(n, f"{kind} node") for kind, n in sorted(shape.others.items()))
        what = f"what else distinguishes it is {kinds} ({without_forks})"
        return ", ".join(sorted(shape.others)), what, _NODE_ADVICE
    return "kernels", f"its kernels make it slow ({without_forks})", FindingKind.SLOW_LAUNCH.advice


def _branches_text(shape: GraphShape) -> str:
    return f"{count_of(shape.forks, 'fork')} and {count_of(shape.joins, 'join')}"
