"""Check of the tensors that a forward returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from graphkit.errors import OutputError
from graphkit.runners.output_fields import OutputRow


@dataclass(frozen=True, slots=True)
class OutputCheck:
    """Checks the output fields of a forward, at capture and in eager runs but never in replays.

    Attributes:
        forward: The forward, as messages name it.
        rows: What a row of each field is, by name; fields that are not in it may have any rows.
    """

    forward: str = "the forward"
    rows: Mapping[str, OutputRow] = field(default_factory=dict)

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
