"""Alignment of two sequences of keys."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

MAX_EDITS = 1500
"""Sequences with more edits between them are not aligned; the work grows with its square."""

_Run = tuple["_Run | None", int, int, int]
"""The run before, a position in either sequence, and the number of pairs from there on."""


def align(before: Sequence[Hashable], after: Sequence[Hashable]) -> list[tuple[int, int]]:
    """Pair the positions of equal keys, in order, as many as possible.

    Myers, "An O(ND) difference algorithm and its variations", 1986. ``difflib`` pairs fewer, and
    takes minutes where few keys repeat often, as the kernels of equal layers do.

    Returns:
        Ascending pairs; none if aligning the keys that both sequences contain takes more than
        ``MAX_EDITS`` edits.
    """
    common = set(before) & set(after)
    left = [position for position, key in enumerate(before) if key in common]
    right = [position for position, key in enumerate(after) if key in common]
    run = _last_run([before[i] for i in left], [after[j] for j in right])
    return [(left[i], right[j]) for i, j in reversed(list(_pairs_backwards(run)))]


def _last_run(before: Sequence[Hashable], after: Sequence[Hashable]) -> _Run | None:
    """Extend every path by one edit at a time until one reaches both ends."""
    furthest: dict[int, tuple[int, _Run | None]] = {1: (0, None)}
    for edits in range(MAX_EDITS):
        for diagonal in range(-edits, edits + 1, 2):
            inserts = diagonal == -edits or (
                diagonal != edits and furthest[diagonal - 1][0] < furthest[diagonal + 1][0]
            )
            start, run = furthest[diagonal + 1] if inserts else furthest[diagonal - 1]
            start += not inserts
            end = _run_end(before, after, start, start - diagonal)
            if end > start:
                run = (run, start, start - diagonal, end - start)
            furthest[diagonal] = end, run
            if end >= len(before) and end - diagonal >= len(after):
                return run
    return None


def _run_end(before: Sequence[Hashable], after: Sequence[Hashable], i: int, j: int) -> int:
    while i < len(before) and j < len(after) and before[i] == after[j]:
        i, j = i + 1, j + 1
    return i


def _pairs_backwards(run: _Run | None) -> Iterator[tuple[int, int]]:
    while run is not None:
        run, i, j, length = run
        yield from ((i + step, j + step) for step in reversed(range(length)))
