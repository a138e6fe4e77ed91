"""What replays, eager steps and captures of a batch size cost, from a record or by padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from graphkit.errors import RecordError
from graphkit.records import CaptureRecord, ModeRecord

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class SizeCosts:
    """Costs of the sizes 0 to M, each [M + 1]; entry 0 is unused.

    Attributes:
        mode: Forward mode of the measurements; empty without any.
        replay_us: Time of a replay at a captured size. Without measurements, the size itself, so
            that the least time is the least padding.
        eager_us: Time of a step of a live size without a graph; ``None`` if it is not measured.
        memory_bytes, capture_s: What each captured size below the largest takes; ``None`` without
            a record.
        largest_bytes, largest_s: The same of the largest size. It is captured first: its memory is
            used again by the other sizes, and its capture compiles the kernels.
    """

    mode: str
    replay_us: Floats
    eager_us: Floats | None = None
    memory_bytes: Floats | None = None
    capture_s: Floats | None = None
    largest_bytes: Floats | None = None
    largest_s: Floats | None = None


def padding_costs(largest: int) -> SizeCosts:
    """Return costs without measurements."""
    return SizeCosts("", np.arange(largest + 1, dtype=np.float64))


def costs_of(record: CaptureRecord, mode: str, largest: int) -> SizeCosts:
    """Return the measured costs of a mode.

    Times between measured sizes are interpolated. Above the largest they continue as between the
    two largest, and below the smallest they are equal to its time.

    Args:
        record: Record of ``graphkit capture``.
        mode: Forward mode; empty takes the only one that was captured.
        largest: Largest size (M).

    Raises:
        RecordError: The record has no such mode, several if ``mode`` is empty, or no times.
    """
    measured = _mode_of(record, mode)
    sizes = [each for each in measured.sizes if each.replay_us is not None]
    if not sizes:
        raise RecordError(f"the record has no replay times of {measured.mode}. Capture it again.")
    at = [each.batch_size for each in sizes]
    eager = [each.eager_us for each in sizes if each.eager_us is not None]
    rest = sizes[:-1] or sizes
    below = [each.batch_size for each in rest]
    first = sizes[-1]
    scale = np.arange(largest + 1) / first.batch_size
    return SizeCosts(
        mode=measured.mode,
        replay_us=_curve(at, [each.replay_us or 0.0 for each in sizes], largest),
        eager_us=_curve(at, eager, largest) if len(eager) == len(sizes) else None,
        memory_bytes=_curve(below, [float(each.pool_bytes) for each in rest], largest),
        capture_s=_curve(below, [each.capture_ms / 1e3 for each in rest], largest),
        largest_bytes=first.pool_bytes * scale,
        largest_s=np.full(largest + 1, first.capture_ms / 1e3),
    )


def _mode_of(record: CaptureRecord, mode: str) -> ModeRecord:
    captured = {each.mode: each for each in record.modes if each.sizes}
    if not mode and len(captured) == 1:
        return next(iter(captured.values()))
    if not captured:
        raise RecordError(
            "the record has no captured mode. Save one with graphkit capture TARGET --out F.json."
        )
    if mode not in captured:
        what = f"no captured mode {mode}" if mode else "several captured modes"
        raise RecordError(f"the record has {what}: name one of {', '.join(captured)}.")
    return captured[mode]


def _curve(sizes: Sequence[int], values: Sequence[float], largest: int) -> Floats:
    """Return values of 0 to ``largest`` from those of some sizes; none is negative."""
    every = np.arange(largest + 1, dtype=np.float64)
    curve = np.interp(every, sizes, values)
    if len(sizes) > 1:
        slope = (values[-1] - values[-2]) / (sizes[-1] - sizes[-2])
        above = every > sizes[-1]
        curve[above] = values[-1] + max(slope, 0.0) * (every[above] - sizes[-1])
    return np.maximum(curve, 0.0)
