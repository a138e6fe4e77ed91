"""What trust costs: every audit of one graph, and replays under a shadow watch.

The reference model's verify graph. No rival stands beside it, for nobody else audits a graph; the
time that capturing it takes does, since most audits capture or replay it anew.

    python tools/bench/audits.py --out tools/bench/results/audits.json
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from statistics import median

import torch
from measure import Way, host_us, publish

import graphkit as gk
from graphkit.audit import audit_target, lock_target
from graphkit.audit.shadow import ShadowWatch
from graphkit.graphs import environment
from graphkit.records import AuditReport, BenchReport, Measure
from graphkit.reference import reference_target
from graphkit.targets import CaptureTarget

DEVICE = torch.device("cuda", 0)
MODE, SIZE = gk.ForwardMode.TARGET_VERIFY, 8
SELDOM = 10**9
"""No replay on the clock is compared."""
BARS = {"all audits": 2000.0, "pointers": 20.0}


def audited(target: CaptureTarget) -> tuple[AuditReport, float]:
    """A report of every audit, and the milliseconds that it took."""
    began = time.perf_counter()
    report = audit_target(target, modes=[MODE], batch_sizes=[SIZE], device="cuda")
    return report, (time.perf_counter() - began) * 1e3


def audit_ms(target: CaptureTarget, rounds: int) -> dict[str, float]:
    """Median milliseconds of each audit and of all, captures between them included."""
    times: dict[str, list[float]] = {}
    audited(target)  # loads kernels and libraries
    for _ in range(rounds):
        report, took = audited(target)
        times.setdefault("all audits", []).append(took)
        for name in dict.fromkeys(check.audit for check in report.checks):
            own = sum(check.seconds for check in report.checks if check.audit == name)
            times.setdefault(name, []).append(own * 1e3)
    return {name: median(each) for name, each in times.items()}


def lock_ms(target: CaptureTarget) -> float:
    """Milliseconds of a lock, its capture included."""
    began = time.perf_counter()
    lock_target(target, modes=[MODE], batch_sizes=[SIZE], device="cuda")
    return (time.perf_counter() - began) * 1e3


def watched_us(target: CaptureTarget) -> dict[str, float]:
    """Host microseconds of a replay: alone, and under a watch that does not compare it."""
    batch = target.batch(MODE, SIZE, 1)
    with (
        target.runner(MODE, batch_sizes=[SIZE], device=DEVICE) as plain,
        target.runner(MODE, batch_sizes=[SIZE], device=DEVICE) as watched,
    ):
        for runner in (plain, watched):
            runner.capture()
        with ShadowWatch(watched, every=SELDOM):
            return host_us(
                {
                    "replay": Way(lambda _: plain.replay(batch)),
                    "replay under a watch": Way(lambda _: watched.replay(batch)),
                },
                5,
            )


def measures(rounds: int) -> Iterator[Measure]:
    """All figures of the report."""
    target = reference_target(DEVICE, max_batch_size=SIZE)
    with target.runner(MODE, batch_sizes=[SIZE], device=DEVICE) as runner:
        size = runner.capture().sizes[0]
        yield Measure(name="nodes", value=size.num_nodes, unit="")
        yield Measure(name="findings", value=len(audited(target)[0].findings), unit="", bar=0)
    for name, value in audit_ms(target, rounds).items():
        yield Measure(name=name, value=value, unit="ms", bar=BARS.get(name))
    yield Measure(name="lock", value=lock_ms(target), unit="ms")
    for name, value in watched_us(target).items():
        yield Measure(name=f"host: {name}", value=value, unit="us")


def report(rounds: int) -> BenchReport:
    """Measure everything."""
    return BenchReport(
        name="audits: what trust costs",
        environment=environment(DEVICE),
        settings={"mode": MODE.name, "size": SIZE, "rounds": rounds},
        measures=tuple(measures(rounds)),
    )


def main(argv: list[str] | None = None) -> int:
    """The command."""
    return publish(__doc__ or "", 5, report, argv)


if __name__ == "__main__":
    sys.exit(main())
