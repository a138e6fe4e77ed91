"""Validation of request rows."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from graphkit.errors import InputError

_INT = {int}
"""Types of the elements of the usual list, which needs no numpy."""


def validate_rows(
    req_pool_indices: Sequence[int],
    last: int,
    until: Collection[int] = (),
    *,
    may_be_empty: bool = False,
) -> list[int]:
    """Return distinct request rows.

    Args:
        req_pool_indices: The rows.
        last: Largest row.
        until: Some of the rows.
        may_be_empty: Whether there may be no rows.

    Raises:
        InputError: A value is not a row or occurs twice, or ``until`` has another one.
    """
    field = "req_pool_indices"
    rows = req_pool_indices
    if type(rows) is not list or {*map(type, rows)} != _INT:
        rows = _listed(req_pool_indices)
    if not rows:
        if may_be_empty:
            return rows
        raise _error(field, req_pool_indices, "a sequence of ints, at least one")
    distinct = {*rows}
    if len(distinct) < len(rows) or min(distinct) < 1 or max(distinct) > last:
        raise _error(
            field, req_pool_indices, f"distinct rows from 1 to {last}: row 0 belongs to pads"
        )
    try:
        is_subset = distinct.issuperset(until)
    except TypeError:
        is_subset = False
    if not is_subset:
        raise _error("until", until, f"rows of the batch: {sorted(distinct)}")
    return rows


def _listed(req_pool_indices: Sequence[int]) -> list[int]:
    """Return the ints of a sequence of any type, such as an array."""
    try:
        rows = np.asarray(req_pool_indices)
    except (TypeError, ValueError) as error:  # such as lists of different lengths
        raise _error("req_pool_indices", req_pool_indices, "a sequence of ints") from error
    if rows.ndim != 1 or (len(rows) and rows.dtype.kind not in "iu"):
        raise _error("req_pool_indices", req_pool_indices, "a sequence of ints")
    listed: list[int] = rows.tolist()
    return listed


def _error(field: str, value: object, expected: str) -> InputError:
    return InputError(f"{field} is {value!r}, expected {expected}.", field=field)
