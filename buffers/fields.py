"""How an input field is declared: once, on the inputs dataclass of its mode.

Allocation, padding, refresh, validation and everything that people see read this declaration.

Row shapes use the letters of the docstrings: W tokens per request, K topk, S num_steps, H hidden
size, D hidden size that feeds the draft model.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

Rows = Any
"""A field's live rows: a torch tensor or a numpy array; always a tensor when a forward sees it."""

MODEL_DTYPE = "model"
"""Stands for ``BufferSizes.dtype``."""

_KEY = "graphkit"


class Axis(Enum):
    """What a field has one row of."""

    REQUEST = "request"
    TOKEN = "token"
    NONE = "none"


class Pad(Enum):
    """Pad values that only the runner knows."""

    SEQ_LEN = "the attention backend's seq_len_fill_value"
    WIDTH = "rows of a pad request: tokens_per_request, or 1 where rows vary"


@dataclass(frozen=True, slots=True)
class Field:
    """The declaration of one field.

    Attributes:
        name: As on the dataclass.
        axis: What it has one row of.
        dtype: A ``torch.dtype``, or ``MODEL_DTYPE``.
        pad: What the tail is filled with.
        row: Shape of one row, letters or numbers; empty for a scalar.
        lead: Length of a dimension before the rows, 0 if there is none.
        flat: Whether the tensor is one-dimensional, its rows laid side by side.
        optional: Whether a runner may be captured without it.
        on_device: Whether it is too large for the mailbox, so that its address travels instead.
        may_go_unread: Whether it is there for those who need its meaning; a forward that reads
            nothing of any other field ignores it by mistake.
        meaning: One sentence.
    """

    name: str
    axis: Axis
    dtype: torch.dtype | str
    pad: int | bool | Pad
    row: tuple[str | int, ...]
    lead: int
    flat: bool
    optional: bool
    on_device: bool
    may_go_unread: bool
    meaning: str


def declare(
    axis: Axis,
    dtype: torch.dtype | str,
    meaning: str,
    *,
    pad: int | bool | Pad = 0,
    row: tuple[str | int, ...] = (),
    lead: int = 0,
    flat: bool = False,
    optional: bool = False,
    on_device: bool = False,
    may_go_unread: bool = False,
) -> Any:
    """A dataclass field that carries its declaration; see ``Field`` for the arguments."""
    facts = (axis, dtype, pad, row, lead, flat, optional, on_device, may_go_unread, meaning)
    return dataclasses.field(default=None, metadata={_KEY: facts})


def fields_of(inputs: type) -> tuple[Field, ...]:
    """The declarations on an inputs dataclass, in order."""
    return tuple(
        Field(field.name, *field.metadata[_KEY])
        for field in dataclasses.fields(inputs)
        if _KEY in field.metadata
    )
