"""Counts of accepted tokens, with and without the bonus token.

They are two fields with two names, because one count with two meanings causes off-by-one errors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from graphkit.buffers.layout import Rows
from graphkit.errors import InputError
from graphkit.graphs import is_recording


@dataclass(frozen=True, slots=True, eq=False)
class AcceptedCounts:
    """Accepted drafts and accepted tokens: ``num_accepted_tokens == num_accepted_drafts + 1``.

    Neither is changed in place.

    Attributes:
        num_accepted_drafts: Draft tokens that passed verification, without the bonus token.
        num_accepted_tokens: The same, with the bonus token.

    Shapes:
        both: [B] int32, tensors or numpy arrays.

    Raises:
        InputError: The counts are not integers, have different shapes or contradict each other.
            Values on a device are not checked, because reading them would wait for the device.
    """

    num_accepted_drafts: Rows
    num_accepted_tokens: Rows

    def __post_init__(self) -> None:
        drafts, tokens = (_array(name, rows) for name, rows in self.fields().items())
        if drafts.shape != tokens.shape:
            raise _refusal(f"have shapes {tuple(drafts.shape)} and {tuple(tokens.shape)}")
        check_counts(drafts, tokens)

    @classmethod
    def from_drafts(cls, num_accepted_drafts: Rows) -> AcceptedCounts:
        """Return both counts from accepted drafts, which the verify ops count."""
        return cls(num_accepted_drafts, _array("num_accepted_drafts", num_accepted_drafts) + 1)

    @classmethod
    def from_tokens(cls, num_accepted_tokens: Rows) -> AcceptedCounts:
        """Return both counts from accepted tokens, bonus token included."""
        return cls(_array("num_accepted_tokens", num_accepted_tokens) - 1, num_accepted_tokens)

    def fields(self) -> dict[str, Rows]:
        """Return both counts as keyword arguments of the draft-extend inputs."""
        return {
            "num_accepted_drafts": self.num_accepted_drafts,
            "num_accepted_tokens": self.num_accepted_tokens,
        }


def check_counts(num_accepted_drafts: Rows, num_accepted_tokens: Rows) -> None:
    """Refuse counts that contradict each other, as far as the host can read them."""
    drafts, tokens = host_rows(num_accepted_drafts), host_rows(num_accepted_tokens)
    if drafts is None or tokens is None:
        return
    if not np.array_equal(drafts + 1, tokens) or (drafts < 0).any():
        raise _refusal(f"are {drafts.tolist()} and {tokens.tolist()}")


def host_rows(value: Any) -> NDArray[np.int64] | None:
    """Return the integers that the host can read without waiting; ``None`` if there are none.

    Values of a wrong type also give ``None``: the writer of the field refuses them by name.
    """
    rows = _host_array(value)
    return rows.astype(np.int64) if rows is not None and rows.dtype.kind in "iu" else None


def host_floats(value: Any) -> NDArray[np.float64] | None:
    """Return the floats that the host can read without waiting; ``None`` if there are none."""
    rows = _host_array(value)
    return rows.astype(np.float64) if rows is not None and rows.dtype.kind == "f" else None


def _host_array(value: Any) -> NDArray[Any] | None:
    if isinstance(value, torch.Tensor):
        is_plain = value.layout is torch.strided and not value.is_quantized
        if not value.is_cpu or not is_plain or value.is_complex() or is_recording():
            return None
        value = value.detach()
        value = (value.double() if value.is_floating_point() else value).numpy()
    try:
        return np.asarray(value)
    except ValueError:
        return None


def _array(name: str, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        is_wrong = value.is_floating_point() or value.is_complex() or value.dtype is torch.bool
        if value.layout is torch.strided and not is_wrong:
            return value
        fact = str(value.dtype) if is_wrong else "a sparse tensor"
    elif isinstance(value, np.ndarray):
        if value.dtype.kind in "iu":
            return value
        fact = f"numpy {value.dtype}"
    else:
        fact = f"a {type(value).__name__}"
    raise InputError(
        f"{name} is {fact}. Pass a dense tensor or a numpy array of int32.", field=name
    )


def _refusal(fact: str) -> InputError:
    return InputError(
        f"num_accepted_drafts and num_accepted_tokens {fact}. num_accepted_tokens must be "
        "num_accepted_drafts + 1: create both with AcceptedCounts.from_drafts.",
        field="num_accepted_tokens",
    )
