"""Declaration of output fields: once, on the output dataclass of a mode, and their check.

Row shapes use these letters: V vocabulary (the draft model's in its modes), H hidden size, D
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
from graphkit.config import BufferSizes
from graphkit.errors import ConfigError, OutputError
from graphkit.spec import SpecConfig


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
        axis: What the field has one row of. A field of ``Axis.NONE`` has one row.
        dtype: Dtype of the field. With ``MODEL_DTYPE`` a forward may return any floating-point
            dtype, and the output of an idle batch has ``BufferSizes.dtype``.
        row: Shape of one row, as letters (see the module) or numbers. ``None`` allows any, and
            leaves the field out of the output of an idle batch.
        optional: Whether a forward may leave the field ``None``.
    """
    facts = OutputField(axis, dtype, row, optional)
    default = {"default": None} if optional else {}
    return dataclasses.field(metadata={"output": facts}, **default)  # type: ignore[call-overload]


@dataclass(frozen=True, slots=True)
class OutputRow:
    """Rows of an output field with the sizes of a runner.

    Attributes:
        shape: Shape of one row.
        dtype: Dtype of the field; ``None`` selects any floating-point one.
        source: Where the numbers of ``shape`` come from, as a phrase.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype | None
    source: str

    def fits(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor has such rows."""
        is_dtype = tensor.is_floating_point() if self.dtype is None else tensor.dtype is self.dtype
        return tuple(tensor.shape[1:]) == self.shape and is_dtype


def output_rows(
    fields: Mapping[str, OutputField], spec: SpecConfig, sizes: BufferSizes, *, is_draft: bool
) -> dict[str, OutputRow]:
    """Return the rows of the fields that declare them, by name."""
    steps, topk, width = spec.num_steps, spec.topk, spec.num_draft_tokens
    letters = {
        "V": (sizes.vocab_size, "BufferSizes.vocab_size"),
        "H": (sizes.hidden_size, "BufferSizes.hidden_size"),
        "D": (sizes.hidden_size, "BufferSizes.hidden_size"),
        "S": (steps, "SpecConfig.num_steps"),
        "K": (topk, "SpecConfig.topk"),
        "N": (width - 1, "SpecConfig.num_draft_tokens - 1"),
        "P": (topk * (steps - 1) + 1, "topk * (num_steps - 1) + 1"),
    }
    if is_draft and sizes.draft_vocab_size is not None:
        letters["V"] = sizes.draft_vocab_size, "BufferSizes.draft_vocab_size"
    if sizes.spec_hidden_size is not None:
        letters["D"] = sizes.spec_hidden_size, "BufferSizes.spec_hidden_size"
    rows = {}
    for name, declared in fields.items():
        if declared.row is None:
            continue
        unknown = [n for n in declared.row if isinstance(n, str) and n not in letters]
        if unknown:
            raise ConfigError(
                f"output field {name!r} declares a row of {unknown[0]!r}. Use a number or one of "
                f"{', '.join(letters)}.",
                field=name,
            )
        named = [letters[n] for n in declared.row if isinstance(n, str)]
        rows[name] = OutputRow(
            tuple(letters[n][0] if isinstance(n, str) else n for n in declared.row),
            None if isinstance(declared.dtype, str) else declared.dtype,
            ", ".join(f"{source} is {size}" for size, source in named) or "as declared",
        )
    return rows


def declared_outputs(output: type) -> Mapping[str, OutputField]:
    """Return the declarations on an output dataclass, by name and in order."""
    return {field.name: field.metadata["output"] for field in dataclasses.fields(output)}


@dataclass(frozen=True, slots=True)
class OutputCheck:
    """Checks the output fields of a forward, at capture and in eager runs but never in replays.

    Attributes:
        forward: The forward, as messages name it.
        rows: What a row of each field is, by name; fields that are not in it may have any rows.
    """

    forward: str = "the forward"
    rows: Mapping[str, OutputRow] = dataclasses.field(default_factory=dict)

    def check_field(self, name: str, tensor: Any, allowed: Mapping[str, int]) -> None:
        """Refuse a field that is not a tensor with one of the allowed numbers of rows.

        Args:
            name: The output field.
            tensor: Its value, as the forward returned it.
            allowed: Numbers of rows, by what has one row each.

        Raises:
            OutputError: The field is not such a tensor, or its rows have another shape or dtype.
        """
        if not isinstance(tensor, torch.Tensor) or tensor.ndim < 1:
            raise OutputError(
                f"{self.forward} returned {name} as {_kind(tensor)}. Return a tensor."
            )
        if tensor.shape[0] not in allowed.values():
            wanted = " or ".join(f"{count} {what}s" for what, count in allowed.items())
            raise OutputError(
                f"{self.forward} returned {tensor.shape[0]} rows of {name} for {wanted}. "
                "Return one row for each."
            )
        row = self.rows.get(name)
        if row is not None and not row.fits(tensor):
            raise OutputError(
                f"{self.forward} returned {name} as {list(tensor.shape)} {tensor.dtype}, expected "
                f"{[tensor.shape[0], *row.shape]} {row.dtype or 'floating-point'}: {row.source}. "
                "Correct the forward or these sizes."
            )


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"
