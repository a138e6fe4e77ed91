"""The shadow audit: a shadow watch over replays of sample batches."""

from __future__ import annotations

from typing import Any

from graphkit.audit.audit_log import AuditLog
from graphkit.audit.places import requests_text
from graphkit.audit.runs import live_sizes
from graphkit.audit.shadow.watch import ShadowWatch
from graphkit.graphs import StateSnapshot
from graphkit.records.audit import Audit
from graphkit.runners import Runner
from graphkit.runners.comparison.step_comparison import SEED, restorable_state
from graphkit.runners.targets import CaptureTarget


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
