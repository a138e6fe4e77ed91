"""Declaration of output fields: once, on the output dataclass of a mode.

Row shapes use these letters: V vocabulary (that of the draft model in its modes), H hidden size, D
spec_hidden_size, S num_steps, K topk, N draft nodes without the root (num_draft_tokens - 1), P
parents of a draft tree (K * (S - 1) + 1).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from graphkit.buffers import MODEL_DTYPE, Axis


@dataclass(frozen=True, slots=True)
class OutputField:
    """Declaration of one output field; see ``declare_output`` for the attributes."""

    axis: Axis
    dtype: torch.dtype | str
    row: tuple[str | int, ...] | None
    optional: bool


def declare_output(
    axis: Axis,
    dtype: torch.dtype | str = MODEL_DTYPE,
    *,
    row: tuple[str | int, ...] | None = (),
    optional: bool = False,
) -> Any:
    """Declare a field of an output dataclass.

    Args:
        axis: ``Axis.REQUEST`` or ``Axis.TOKEN``: what the field has one row of.
        dtype: Dtype of the field in the output of an idle batch; ``MODEL_DTYPE`` is
            ``BufferSizes.dtype``.
        row: Shape of one row, as letters (see the module) or numbers. ``None`` leaves the field out
            of the output of an idle batch.
        optional: Whether a forward may leave the field ``None``.
    """
    facts = OutputField(axis, dtype, row, optional)
    default = {"default": None} if optional else {}
    return dataclasses.field(metadata={"output": facts}, **default)  # type: ignore[call-overload]


def output_fields_of(output: type) -> Mapping[str, OutputField]:
    """Return the declarations on an output dataclass, by name and in order."""
    return {field.name: field.metadata["output"] for field in dataclasses.fields(output)}
