"""Measure what launching each graph costs the host, and count the streams of the process.

The driver launches kernels in one line in nearly constant time, for any number of them (NVIDIA,
"Constant Time Launch for Straight-Line CUDA Graphs"). Other graphs take host time for every node.
Nothing here makes a replay wrong, so all findings are notes.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from graphkit.audit.audit_log import AuditLog, Check
from graphkit.audit.finding_kinds import FindingKind
from graphkit.graphs import CudaBackend, StateSnapshot
from graphkit.graphs.driver import checked
from graphkit.graphs.streams import ONE_STREAM_ADVICE, streams_in_use
from graphkit.records import GraphRecord, count_of
from graphkit.records.audit import NOT_CHECKED, Audit
from graphkit.runners import Runner
from graphkit.runners.comparison.step_comparison import restorable_state
from graphkit.runners.targets import CaptureTarget

_LINEAR_US, _LINEAR_US_PER_NODE = 10.0, 0.1
"""Upper bounds of the host time of a linear graph: 4.5 us on an H200, for nearly any length."""
_SLOW = 2.0
"""Multiple of the time of a linear graph above which the audit reports a launch."""
_WARM_UPS, _LAUNCHES = 3, 15
"""Launches before the measured ones, and measured: enough for a steady median."""
REPETITIONS = _WARM_UPS + _LAUNCHES
"""Launches of one measurement."""
_FORK_ADVICE = (
    "Capture the branches one after the other on one stream, unless running them at the same time "
    "saves the device more than the launch costs the host."
)
_NODE_ADVICE = "Move this work out of the captured forward, or into kernels."


def audit_launch(_target: CaptureTarget, runner: Runner[Any, Any], log: AuditLog) -> None:
    """Report graphs whose launch takes far more host time than the launch of a linear graph.

    The recorder launches nothing, so nothing is measured there. Restores declared state.
    """
    if not isinstance(runner.backend, CudaBackend):
        with log.check(Audit.LAUNCH, runner.mode.name) as check:
            check.text = f"{NOT_CHECKED}the recorder launches no graph"
        return
    with torch.cuda.device(runner.device):
        for size, graph in sorted(runner.graphs.items()):
            with log.check(Audit.LAUNCH, runner.mode.name, size) as check:
                own_us = _launch_us(runner, size, graph)
                report_launch(runner.inspect(size), own_us, check)


def report_launch(record: GraphRecord, own_us: float, check: Check) -> None:
    """Extend the text of a check by a launch, and report it if it is far above a linear graph's.

    ``own_us`` is the host time of the launch.
    """
    nodes = count_of(len(record.nodes), "node")
    per_node = own_us / max(len(record.nodes), 1)
    branches = _branches_text(record)
    parts = check.text, f"{nodes} launch in {own_us:.1f} us ({per_node:.3f} per node)", branches
    check.text = "; ".join(filter(None, parts))
    if own_us <= _SLOW * _LINEAR_US or per_node <= _LINEAR_US_PER_NODE:
        return
    kinds = Counter(node.kind for node in record.nodes if node.kind != "kernel")
    others = ", ".join(count_of(count, f"{kind} node") for kind, count in sorted(kinds.items()))
    # The driver takes host time for every node of a graph with forks, whatever else it has.
    cause, what, advice = "forks", branches, _FORK_ADVICE
    if not branches:
        cause, what, advice = ", ".join(sorted(kinds)), f"{others} and no fork", _NODE_ADVICE
    if not branches and not kinds:
        cause, what, advice = "kernels", "kernels in one line", FindingKind.SLOW_LAUNCH.advice
    check.report(
        FindingKind.SLOW_LAUNCH,
        f"the launch of {nodes} takes {own_us:.1f} us of host time, {per_node:.2f} per node; a "
        f"linear graph takes about {_LINEAR_US:g}. It has {what}.",
        cause=cause,
        advice=advice,
        after=f"{own_us:.1f} us",
    )


def audit_streams(device: torch.device, log: AuditLog) -> None:
    """Count the streams of the process in the summary; no device but a CUDA device has some."""
    if device.type == "cuda":
        log_streams(len(streams_in_use(device)), log)


def log_streams(count: int, log: AuditLog) -> None:
    """Log how many streams are in use, and how replays stay fast.

    Never a finding: which stream runs what is not visible, and the number alone costs nothing.
    """
    with log.check(Audit.LAUNCH) as check:
        check.text = f"{count_of(count, 'stream')} in use; {ONE_STREAM_ADVICE}"


def launch_us(graph: Any, prepare: Callable[[], object]) -> float:
    """Return the median host microseconds of a launch of a graph, from an idle device.

    Launches on the current stream, and waits for the device after each measurement.

    Args:
        graph: A ``CudaGraph`` with an executable.
        prepare: Called before each measurement.

    Raises:
        DeviceError: CUDA refused a launch.
    """
    from cuda.bindings import driver

    launch, samples = driver.cuGraphLaunch, []
    executable = driver.CUgraphExec(graph.graph.raw_cuda_graph_exec())
    stream = driver.CUstream(torch.cuda.current_stream().cuda_stream)
    for _ in range(REPETITIONS):
        prepare()
        torch.cuda.synchronize()
        began = time.perf_counter()
        result = launch(executable, stream)
        samples.append((time.perf_counter() - began) * 1e6)
        torch.cuda.synchronize()
        checked(result)
    return median(samples[_WARM_UPS:])


def _launch_us(runner: Runner[Any, Any], size: int, graph: Any) -> float:
    """Measure the launch of a captured size on a batch of pads."""

    def post_pads() -> None:  # the refresh of the graph reads an entry
        with runner.buffers.posted():
            pass

    with StateSnapshot(restorable_state(runner), runner.device):
        runner.backend.wait_for_replays()
        runner.step.plan_on_host(runner.buffers.view(size), size)
        return launch_us(graph, post_pads)


def _branches_text(record: GraphRecord) -> str:
    """Return the forks and joins of a graph's own nodes; empty for nodes in one line.

    Several first nodes count as a fork.
    """
    own = {node.index for node in record.nodes if node.parent is None}
    edges = [edge for edge in record.edges if edge.target in own]
    dependents = Counter(edge.source for edge in edges)
    dependencies = Counter(edge.target for edge in edges)
    forks = sum(count > 1 for count in dependents.values()) + (len(own) - len(dependencies) > 1)
    joins = sum(count > 1 for count in dependencies.values())
    return f"{count_of(forks, 'fork')} and {count_of(joins, 'join')}" if forks or joins else ""
