"""Validation of request rows."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from graphkit.errors import InputError


def validate_rows(
    req_pool_indices: Sequence[int], last: int, until: Collection[int] = ()
) -> NDArray[np.int64]:
    """Return distinct request rows, [B] int64.

    Args:
        req_pool_indices: The rows, at least one.
        last: Largest row.
        until: Some of the rows.

    Raises:
        InputError: A value is no row or occurs twice, or ``until`` has another one.
    """
    field = "req_pool_indices"
    try:
        rows = np.asarray(req_pool_indices)
    except (TypeError, ValueError) as error:  # such as lists of different lengths
        raise _error(field, req_pool_indices, "a sequence of ints") from error
    if rows.ndim != 1 or not len(rows) or rows.dtype.kind not in "iu":
        raise _error(field, req_pool_indices, "a sequence of ints, at least one")
    distinct = set(rows.tolist())
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
    return rows.astype(np.int64)


def _error(field: str, value: object, expected: str) -> InputError:
    return InputError(f"{field} is {value!r}, expected {expected}.", field=field)
