"""Which places of two sequences belong together."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

_MOST_EDITS = 1500
"""Beyond it two sequences have nothing to do with each other; the work grows with its square."""

_Run = tuple["_Run | None", int, int, int]
"""The run before, a place in either sequence, and how many pairs begin there."""


def align(before: Sequence[Hashable], after: Sequence[Hashable]) -> list[tuple[int, int]]:
    """Pair the places of equal keys, in order, as many as can be.

    Myers, "An O(ND) difference algorithm and its variations", 1986. ``difflib`` pairs fewer, and
    takes minutes where few keys repeat often, as the kernels of equal layers do.

    Returns:
        Ascending pairs; none if more than 1,500 edits among common keys lie between the two.
    """
    common = set(before) & set(after)
    left = [place for place, key in enumerate(before) if key in common]
    right = [place for place, key in enumerate(after) if key in common]
    run = _last_run([before[place] for place in left], [after[place] for place in right])
    return [(left[i], right[j]) for i, j in reversed(list(_pairs_backwards(run)))]


def _last_run(before: Sequence[Hashable], after: Sequence[Hashable]) -> _Run | None:
    """Follow every way through both, one edit longer each time, until one has reached both ends."""
    reached: dict[int, tuple[int, _Run | None]] = {1: (0, None)}
    for edits in range(_MOST_EDITS):
        for diagonal in range(-edits, edits + 1, 2):
            inserts = diagonal == -edits or (
                diagonal != edits and reached[diagonal - 1][0] < reached[diagonal + 1][0]
            )
            start, run = reached[diagonal + 1] if inserts else reached[diagonal - 1]
            start += not inserts
            end = _end_of_run(before, after, start, start - diagonal)
            if end > start:
                run = (run, start, start - diagonal, end - start)
            reached[diagonal] = end, run
            if end >= len(before) and end - diagonal >= len(after):
                return run
    return None


def _end_of_run(before: Sequence[Hashable], after: Sequence[Hashable], i: int, j: int) -> int:
    while i < len(before) and j < len(after) and before[i] == after[j]:
        i, j = i + 1, j + 1
    return i


def _pairs_backwards(run: _Run | None) -> Iterator[tuple[int, int]]:
    while run is not None:
        run, i, j, length = run
        yield from ((i + step, j + step) for step in reversed(range(length)))
