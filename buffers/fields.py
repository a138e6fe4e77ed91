"""Declaration of input fields: once, on the inputs dataclass of a mode.

Allocation, padding, refresh, validation and records read this declaration.

Row shapes use these letters: W tokens per request, K topk, S num_steps, H hidden size, D size of
the hidden states that feed the draft model, M words of a token bitmask: ceil(V / 32).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

Rows = Any
"""Live rows of a field: a torch tensor or a numpy array. A forward always receives a tensor."""

MODEL_DTYPE = "model"
"""The dtype in ``BufferSizes.dtype``."""

_KEY = "graphkit"


class Axis(Enum):
    """Unit that a field has one row of."""

    REQUEST = "request"
    TOKEN = "token"
    NONE = "none"


class Pad(Enum):
    """Pad values that depend on the runner."""

    SEQ_LEN = "the attention backend's seq_len_fill_value"
    WIDTH = "rows of a pad request: tokens_per_request, or 1 in a ragged mode"


@dataclass(frozen=True, slots=True)
class Field:
    """Declaration of one field.

    Attributes:
        name: Name on the dataclass.
        axis: Unit that the field has one row of.
        dtype: A ``torch.dtype``, or ``MODEL_DTYPE``.
        pad: Value of pad rows.
        row: Shape of one row, as letters or numbers; empty for a scalar.
        lead: Length of a dimension before the rows; 0 if there is none.
        flat: Whether the tensor is one-dimensional, with its rows side by side.
        optional: Whether a runner may be captured without the field.
        by_address: Whether the mailbox carries the address of the rows instead of the rows.
        optional_read: Whether a forward that does not read the field is correct. Audits report
            other fields that no node reads.
        meaning: Meaning of a row, as a phrase.
    """

    name: str
    axis: Axis
    dtype: torch.dtype | str
    pad: float | bool | Pad
    row: tuple[str | int, ...]
    lead: int
    flat: bool
    optional: bool
    by_address: bool
    optional_read: bool
    meaning: str


def declare(
    axis: Axis,
    dtype: torch.dtype | str,
    meaning: str,
    *,
    pad: float | bool | Pad = 0,
    row: tuple[str | int, ...] = (),
    lead: int = 0,
    flat: bool = False,
    optional: bool = False,
    by_address: bool = False,
    optional_read: bool = False,
) -> Any:
    """Declare a field of an inputs dataclass. See ``Field`` for the arguments."""
    facts = (axis, dtype, pad, row, lead, flat, optional, by_address, optional_read, meaning)
    return dataclasses.field(default=None, metadata={_KEY: facts})


def fields_of(inputs: type) -> tuple[Field, ...]:
    """Return the declarations on an inputs dataclass, in order."""
    return tuple(
        Field(field.name, *field.metadata[_KEY])
        for field in dataclasses.fields(inputs)
        if _KEY in field.metadata
    )
