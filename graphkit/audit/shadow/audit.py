"""The shadow audit: a shadow watch over replays of sample batches."""

from __future__ import annotations

from typing import Any

from graphkit.audit.audit_log import AuditLog
from graphkit.audit.shadow.watch import ShadowWatch
from graphkit.graphs import StateSnapshot
from graphkit.runners import Runner
from graphkit.targets import CaptureTarget
from graphkit.verify.comparison import restorable_state

_SEED = 50


def audit_shadow(target: CaptureTarget, runner: Runner[Any, Any], log: AuditLog) -> None:
    """Compare replays of sample batches at every size with the step without a graph.

    Args:
        target: Makes the batches.
        runner: One of the target's, captured.
        log: Receives checks and findings.
    """
    for size in runner.table:
        with log.check("shadow", runner.mode.name, size) as check:
            watch = ShadowWatch(
                runner,
                every=1,
                weights=target.weights,
                bisect=True,
                tolerance=log.tolerance,
            )
            live_sizes = _live_sizes(min(size, runner.table.max_batch_size))
            with StateSnapshot(restorable_state(runner), runner.device), watch:
                for live in live_sizes:
                    batch = target.batch(runner.mode, live, _SEED + live)
                    runner.replay(batch, padded_batch_size=size)
            check.findings += watch.findings
            lives = ", ".join(map(str, live_sizes))
            check.text = f"compared with the padded and the unpadded step: {lives} live"


def _live_sizes(largest: int) -> list[int]:
    """Return live batch sizes with many pads, some, one and none."""
    return sorted({1, -(-largest // 2), max(largest - 1, 1), largest})
