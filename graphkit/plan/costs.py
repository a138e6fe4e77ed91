"""Costs of replays, eager steps and captures by batch size, from a record or by padding alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from graphkit.errors import RecordError
from graphkit.records import CaptureRecord, ModeRecord
from graphkit.runners.memory_estimate import interpolated

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class SizeCosts:
    """Costs of the sizes 0 to M, each [M + 1]; entry 0 is unused.

    Attributes:
        mode: Forward mode of the measurements; empty without any.
        replay_us: Microseconds of a replay at a captured size. Without measurements, the size
            itself, so that the least time is the least padding.
        eager_us: Microseconds of a step of a live size without a graph; ``None`` if not measured.
        memory_bytes, capture_s: Bytes of graph memory, executables included, and seconds of
            capture, of a captured size below the largest; ``None`` without a record.
        largest_bytes, largest_s: The same for the largest size. It is captured first: the other
            sizes use its memory again, and its capture compiles the kernels.
    """

    mode: str
    replay_us: Floats
    eager_us: Floats | None = None
    memory_bytes: Floats | None = None
    capture_s: Floats | None = None
    largest_bytes: Floats | None = None
    largest_s: Floats | None = None


def padding_costs(largest: int) -> SizeCosts:
    """Return costs without measurements, for the sizes 0 to ``largest``."""
    return SizeCosts("", np.arange(largest + 1, dtype=np.float64))


def measured_costs(record: CaptureRecord, mode: str, largest: int) -> SizeCosts:
    """Return the measured costs of a mode.

    Values between measured sizes are interpolated. Above the largest they continue as between the
    two largest, and below the smallest they are equal to its value. The pool of the largest size is
    proportional to the size.

    Args:
        record: Record of ``graphkit capture``.
        mode: Forward mode; empty takes the only one that was captured.
        largest: Largest size (M).

    Raises:
        RecordError: The record has no such mode, several if ``mode`` is empty, no times, or sizes
            that do not ascend.
    """
    measured = _find_mode(record, mode)
    sizes = [size for size in measured.sizes if size.replay_us is not None]
    if not sizes:
        raise RecordError(f"the record has no replay times of {measured.mode}. Capture it again.")
    timed = [size.batch_size for size in sizes]
    if timed != sorted(set(timed)) or timed[0] < 1:
        raise RecordError(
            f"the record has the sizes {timed} of {measured.mode}, expected ascending sizes from "
            "1. Capture it again."
        )
    eager = [size.eager_us for size in sizes if size.eager_us is not None]
    smaller = sizes[:-1] or sizes
    smaller_sizes = [size.batch_size for size in smaller]
    largest_measured = sizes[-1]
    scale = np.arange(largest + 1) / largest_measured.batch_size
    executables = interpolated(timed, [float(size.executable_bytes) for size in sizes], largest)
    return SizeCosts(
        mode=measured.mode,
        replay_us=interpolated(timed, [size.replay_us or 0.0 for size in sizes], largest),
        eager_us=interpolated(timed, eager, largest) if len(eager) == len(sizes) else None,
        memory_bytes=executables
        + interpolated(smaller_sizes, [float(size.pool_bytes) for size in smaller], largest),
        capture_s=interpolated(smaller_sizes, [size.capture_ms / 1e3 for size in smaller], largest),
        largest_bytes=executables + largest_measured.pool_bytes * scale,
        largest_s=np.full(largest + 1, largest_measured.capture_ms / 1e3),
    )


def _find_mode(record: CaptureRecord, mode: str) -> ModeRecord:
    captured = {found.mode: found for found in record.modes if found.sizes}
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
