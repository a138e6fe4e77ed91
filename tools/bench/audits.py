"""Time of every audit of one graph, and of replays under a shadow watch.

The graph is the reference model's TARGET_VERIFY. Most audits capture or replay it again, so their
times include that.

    python tools/bench/audits.py --out tools/bench/results/audits.json
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from statistics import median

import torch
from timing import Variant, host_us, publish

import graphkit as gk
from graphkit.audit import audit_target, graph_baseline
from graphkit.audit.shadow.watch import ShadowWatch
from graphkit.graphs import environment
from graphkit.models.reference import reference_target
from graphkit.records import AuditReport, BenchReport, Measure
from graphkit.runners.targets import CaptureTarget

DEVICE = torch.device("cuda", 0)
MODE, SIZE = gk.ForwardMode.TARGET_VERIFY, 8
NEVER = 10**9
"""An interval of compared replays that a benchmark does not reach."""
BARS = {"all audits": 2000.0, "pointers": 20.0}


def audit(target: CaptureTarget) -> tuple[AuditReport, float]:
    """Return a report of all audits and its time in milliseconds."""
    began = time.perf_counter()
    report = audit_target(target, modes=[MODE], batch_sizes=[SIZE], device="cuda")
    return report, (time.perf_counter() - began) * 1e3


def audit_ms(target: CaptureTarget, rounds: int) -> dict[str, float]:
    """Return the median milliseconds of each audit, and of all of them with their captures."""
    times: dict[str, list[float]] = {}
    audit(target)  # loads kernels and libraries
    for _ in range(rounds):
        report, took = audit(target)
        times.setdefault("all audits", []).append(took)
        for name in dict.fromkeys(check.audit for check in report.checks):
            own = sum(check.seconds for check in report.checks if check.audit == name)
            times.setdefault(name, []).append(own * 1e3)
    return {name: median(each) for name, each in times.items()}


def lock_ms(target: CaptureTarget) -> float:
    """Return the milliseconds that a lock takes, its capture included."""
    began = time.perf_counter()
    graph_baseline(target, modes=[MODE], batch_sizes=[SIZE], device="cuda")
    return (time.perf_counter() - began) * 1e3


def watched_us(target: CaptureTarget) -> dict[str, float]:
    """Return the host microseconds of a replay, plain and under a watch that does not compare."""
    batch = target.batch(MODE, SIZE, 1)
    with (
        target.runner(MODE, batch_sizes=[SIZE], device=DEVICE) as plain,
        target.runner(MODE, batch_sizes=[SIZE], device=DEVICE) as watched,
    ):
        for runner in (plain, watched):
            runner.capture()
        with ShadowWatch(watched, every=NEVER):
            return host_us(
                {
                    "replay": Variant(lambda _: plain.replay(batch)),
                    "replay under a watch": Variant(lambda _: watched.replay(batch)),
                },
                5,
            )


def measures(rounds: int) -> Iterator[Measure]:
    """Yield all measures of the report."""
    target = reference_target(DEVICE, max_batch_size=SIZE)
    with target.runner(MODE, batch_sizes=[SIZE], device=DEVICE) as runner:
        size = runner.capture().sizes[0]
        yield Measure(name="nodes", value=size.num_nodes, unit="")
        yield Measure(name="findings", value=len(audit(target)[0].findings), unit="", bar=0)
    for name, value in audit_ms(target, rounds).items():
        yield Measure(name=name, value=value, unit="ms", bar=BARS.get(name))
    yield Measure(name="lock", value=lock_ms(target), unit="ms")
    for name, value in watched_us(target).items():
        yield Measure(name=f"host: {name}", value=value, unit="us")


def report(rounds: int) -> BenchReport:
    """Run the benchmark and return its report."""
    return BenchReport(
        name="audits: time of every audit of one graph",
        environment=environment(DEVICE),
        settings={"mode": MODE.name, "size": SIZE, "rounds": rounds},
        measures=tuple(measures(rounds)),
    )


def main(argv: list[str] | None = None) -> int:
    """Run the command."""
    return publish(__doc__ or "", 5, report, argv)


if __name__ == "__main__":
    sys.exit(main())
