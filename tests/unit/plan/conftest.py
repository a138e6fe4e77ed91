"""A record of two modes with measured sizes."""

from __future__ import annotations

import pytest

from graphkit.records import CaptureRecord, Environment, ModeRecord, ReplayStats, SizeRecord


def mode_record(name, us, eager_us, live_sizes):
    """Return a mode whose sizes have the given times of replays and eager steps."""
    sizes = [
        SizeRecord(
            batch_size=size, num_tokens=size, num_nodes=10,
            capture_ms=1000.0 if size == 8 else 100.0,
            pool_bytes=1000 if size < 8 else 80_000, replay_us=one, eager_us=other,
        )
        for (size, one), other in zip(us.items(), eager_us, strict=True)
    ]  # fmt: skip
    stats = ReplayStats(
        replays=sum(live_sizes.values()), padded_rows=0, fallbacks={}, replays_by_size={},
        live_sizes=live_sizes,
    )  # fmt: skip
    return ModeRecord(
        mode=name, tokens_per_request=1, host_planned=False, input_bytes=0, sizes=tuple(sizes),
        stats=stats,
    )  # fmt: skip


@pytest.fixture(scope="session")
def capture_record():
    """Return a record of TARGET_VERIFY at 1, 4 and 8, and DECODE at 2."""
    verify = {1: 100.0, 4: 160.0, 8: 400.0}
    return CaptureRecord(
        target="model",
        backend="cuda",
        environment=Environment(device="GPU", torch="", triton="", cuda="", driver="", graphkit=""),
        modes=(
            mode_record("TARGET_VERIFY", verify, [900.0, 900.0, 900.0], {1: 3, 2: 4, 4: 1}),
            mode_record("DECODE", {2: 50.0}, [10.0], {2: 5}),
        ),
    )
