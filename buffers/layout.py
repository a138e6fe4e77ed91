"""Input fields: their declaration, and their layout in the arena and in a mailbox entry.

Allocation, padding, refresh, validation and records read this declaration.

Row shapes use these letters: W tokens per request, K topk, S num_steps, H hidden size, D size of
the hidden states that feed the draft model, M words of a token bitmask: ceil(V / 32).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from math import prod
from typing import Any

import torch

from graphkit.config import BufferSizes, bitmask_words
from graphkit.errors import ConfigError
from graphkit.ops.refresh import Header
from graphkit.spec import SpecConfig

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


_AXIS_WORD = {
    Axis.REQUEST: Header.REQUESTS,
    Axis.TOKEN: Header.TOKENS,
    Axis.NONE: Header.HAS_ROWS,
}


@dataclass(frozen=True, slots=True)
class Capacity:
    """Rows of each axis at the largest size, and the values of the letters of row shapes.

    Attributes:
        requests: Largest captured batch size.
        tokens_per_request: Rows per request (W).
        letters: Value of each letter.
        model_dtype: Value of ``MODEL_DTYPE``.
        seq_len_fill: Value of ``Pad.SEQ_LEN``.
        ragged: Whether a request may have fewer rows than ``tokens_per_request``. The rows of a
            ragged batch are packed, and a pad request has one row.
        front_tokens: Rows of each request before its accepted ones, which run again.
    """

    requests: int
    tokens_per_request: int
    letters: Mapping[str, int]
    model_dtype: torch.dtype
    seq_len_fill: int
    ragged: bool = False
    front_tokens: int = 0

    def rows(self, axis: Axis, requests: int, tokens: int | None = None) -> int:
        """Return the rows of an axis in a batch.

        Args:
            axis: The axis.
            requests: Requests of the batch.
            tokens: Tokens of the batch; by default all requests have the full width.
        """
        if axis is Axis.NONE:
            return 1
        if axis is Axis.REQUEST:
            return requests
        return requests * self.tokens_per_request if tokens is None else tokens


def runner_capacity(
    spec: SpecConfig,
    sizes: BufferSizes,
    *,
    requests: int,
    tokens_per_request: int,
    seq_len_fill: int = 1,
    ragged: bool = False,
    front_tokens: int = 0,
) -> Capacity:
    """Return the capacity of a runner with these settings."""
    letters = {
        "W": tokens_per_request,
        "K": spec.topk,
        "S": spec.num_steps,
        "H": sizes.hidden_size,
        "D": sizes.spec_hidden_size or sizes.hidden_size,
        "M": bitmask_words(sizes.vocab_size),
    }
    return Capacity(
        requests, tokens_per_request, letters, sizes.dtype, seq_len_fill, ragged, front_tokens
    )


@dataclass(frozen=True, slots=True)
class FieldLayout:
    """Declaration of a field with all letters and symbols resolved.

    Attributes:
        field: Its declaration.
        dtype: Dtype of its elements.
        row: Shape of one row.
        capacity: Rows at the largest size.
        pad: Value of the tail.
        first_segment: Index of the first of its ``segments`` segments.
        payload: Byte offset of its rows in an entry; 0 if the entry holds only their address.
    """

    field: Field
    dtype: torch.dtype
    row: tuple[int, ...]
    capacity: int
    pad: float | bool
    first_segment: int
    payload: int

    @property
    def name(self) -> str:
        """Name of the field."""
        return self.field.name

    @property
    def axis_word(self) -> Header:
        """Header word that counts its live rows."""
        return _AXIS_WORD[self.field.axis]

    @property
    def segments(self) -> int:
        """Number of runs of consecutive rows."""
        return max(self.field.lead, 1)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return prod(self.row) * self.dtype.itemsize

    @property
    def segment_bytes(self) -> int:
        """Bytes of one segment at the largest size."""
        return self.capacity * self.row_bytes

    @property
    def total_bytes(self) -> int:
        """Bytes of all segments at the largest size."""
        return self.segments * self.segment_bytes

    @property
    def dim(self) -> int:
        """Dimension that counts rows."""
        return 1 if self.field.lead else 0

    def shape(self, rows: int) -> tuple[int, ...]:
        """Return the shape of the field with that many rows."""
        lead = (self.field.lead,) if self.field.lead else ()
        return (*lead, rows * prod(self.row)) if self.field.flat else (*lead, rows, *self.row)

    def head(self, tensor: torch.Tensor, rows: int) -> torch.Tensor:
        """Return the first rows of a tensor that holds the field, as a view."""
        return tensor.narrow(self.dim, 0, self.shape(rows)[self.dim])


def resolve(fields: Sequence[Field], capacity: Capacity) -> tuple[FieldLayout, ...]:
    """Return the layouts of fields, placed one after the other.

    Raises:
        ConfigError: A declaration names an unknown dtype or letter.
    """
    layouts: list[FieldLayout] = []
    payload = _aligned((Header.SOURCES + sum(max(field.lead, 1) for field in fields)) * 8)
    segment = 0
    for field in fields:
        layout = _resolve_one(field, capacity, segment, 0 if field.by_address else payload)
        layouts.append(layout)
        segment += layout.segments
        if not field.by_address:
            payload = _aligned(payload + layout.total_bytes)
    return tuple(layouts)


def header_bytes(layouts: Sequence[FieldLayout]) -> int:
    """Return the bytes of an entry's header and sources."""
    return (Header.SOURCES + sum(layout.segments for layout in layouts)) * 8


def entry_bytes(layouts: Sequence[FieldLayout]) -> int:
    """Return the bytes of a mailbox entry: header, sources, payload."""
    ends = [
        layout.payload + layout.total_bytes for layout in layouts if not layout.field.by_address
    ]
    return _aligned(max([header_bytes(layouts), *ends]))


def _resolve_one(field: Field, capacity: Capacity, segment: int, payload: int) -> FieldLayout:
    dtype = capacity.model_dtype if field.dtype == MODEL_DTYPE else field.dtype
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(
            f"field {field.name!r} declares dtype {field.dtype!r}. "
            "Use a torch.dtype or MODEL_DTYPE.",
            field=field.name,
        )
    unknown = [n for n in field.row if isinstance(n, str) and n not in capacity.letters]
    if unknown:
        raise ConfigError(
            f"field {field.name!r} declares a row of {unknown[0]!r}. "
            f"Use a number or one of {', '.join(capacity.letters)}.",
            field=field.name,
        )
    width = 1 if capacity.ragged else capacity.tokens_per_request
    pads = {Pad.SEQ_LEN: capacity.seq_len_fill, Pad.WIDTH: width}
    return FieldLayout(
        field=field,
        dtype=dtype,
        row=tuple(capacity.letters[n] if isinstance(n, str) else n for n in field.row),
        capacity=capacity.rows(field.axis, capacity.requests),
        pad=pads[field.pad] if isinstance(field.pad, Pad) else field.pad,
        first_segment=segment,
        payload=payload,
    )


_LINE_BYTES = 128
"""A cache line of the GPU, and a multiple of the sixteen bytes that a refresh copies at once."""


def _aligned(size: int) -> int:
    return -(-size // _LINE_BYTES) * _LINE_BYTES
