"""Checks of the batches of a runner, for a replay and for a run without a graph."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from graphkit.buffers.inputs import StepInputs
from graphkit.buffers.layout import Capacity, FieldLayout, fields_of, resolve
from graphkit.buffers.validation import validate_field, wrong_count
from graphkit.errors import InputError


@dataclass(frozen=True, slots=True)
class CheckedRows:
    """The rows of a batch whose fields have been checked.

    Attributes:
        rows: Tensor of each field by name, on the device or the CPU; the caller's where no cast was
            needed.
        width: Largest number of rows of a request, or an upper bound.
        is_packed: Whether the rows are those of a prefill, packed.
    """

    rows: Mapping[str, torch.Tensor]
    width: int
    is_packed: bool


class BatchChecks:
    """Checks the fields of batches, and whether the graphs of a runner read them.

    Args:
        inputs: Class of the inputs.
        layouts: The captured fields.
        capacity: Rows at the largest size.
        device: Device of the fields.
        without: Fields that the runner does not use.
        bound_fields: Storage of fields that another graph writes, by name.

    Attributes:
        absent: Names of declared fields that no graph reads.
    """

    def __init__(
        self,
        inputs: type[StepInputs],
        layouts: tuple[FieldLayout, ...],
        capacity: Capacity,
        device: torch.device,
        without: Collection[str],
        bound_fields: Mapping[str, torch.Tensor],
    ) -> None:
        self._inputs, self._layouts, self._capacity = inputs, layouts, capacity
        self._device, self._without, self._bound_fields = device, without, bound_fields
        present = {layout.name for layout in layouts}
        self.absent = tuple(f.name for f in fields_of(inputs) if f.name not in present)

    @cached_property
    def compares_fields(self) -> bool:
        """Whether the fields of a batch can contradict each other."""
        return self._inputs.check.__func__ is not StepInputs.check.__func__  # type: ignore[attr-defined]

    @cached_property
    def _shows_tokens(self) -> bool:
        """Whether a batch contains a field whose length is its number of rows."""
        written = {layout.name for layout in self._layouts} - self._bound_fields.keys()
        return not written.isdisjoint(self._inputs.token_fields())

    def count_tokens(self, batch: Any) -> int:
        """Return the number of rows of a batch.

        If no field of the batch shows it, the batch has the captured number of rows per request.
        """
        if self._shows_tokens:
            return int(batch.num_tokens)
        counts = self._inputs.row_counts(batch) if self._capacity.ragged else None
        if counts is not None:
            return int(counts.sum())
        return int(batch.batch_size * self._capacity.tokens_per_request)

    def wrong_width(self, requests: int, tokens: int) -> str:
        """Return the reason why no graph takes so many rows per request, or an empty string."""
        width, ragged = self._capacity.tokens_per_request, self._capacity.ragged
        if (requests if ragged else requests * width) <= tokens <= requests * width:
            return ""
        return (
            f"the batch has {tokens} tokens in {requests} requests; captured are "
            f"{f'1 to {width}' if ragged else width} tokens per request"
        )

    def surplus_field(self, batch: Any) -> str | None:
        """Return the name of a field of the batch that the graph does not read, if there is one."""
        for name in self.absent:
            if getattr(batch, name, None) is not None:
                return name
        return None

    def not_captured(self, name: str) -> str:
        """Return the error text for a field of a batch that the graph does not read."""
        if name in self._without:
            return f"field {name!r} was not captured: the algorithm does not use it. Leave it out."
        return f"field {name!r} was not captured. Pass optional_fields=[{name!r}] to the runner."

    def check_idle(self, batch: Any) -> None:
        """Refuse an idle batch that has rows."""
        self.check_width(0, self.count_tokens(batch))

    def check_width(self, requests: int, tokens: int) -> None:
        """Refuse a number of rows that no graph takes."""
        if wrong := self.wrong_width(requests, tokens):
            raise InputError(f"{wrong}.", field="num_tokens")

    def check_bound(self, batch: Any) -> None:
        """Refuse rows of a bound field, because the graph would ignore them.

        The bound storage itself is accepted.
        """
        for name, storage in self._bound_fields.items():
            rows = getattr(batch, name, None)
            is_own = isinstance(rows, torch.Tensor) and rows.data_ptr() == storage.data_ptr()
            if rows is not None and not is_own:
                raise InputError(
                    f"field {name!r} is bound: another graph writes its rows. Leave it out.",
                    field=name,
                )

    def compare_fields(self, batch: Any, tokens: int, rows: CheckedRows | None = None) -> None:
        """Refuse a batch whose fields contradict each other; see ``StepInputs.check``.

        Args:
            batch: Live rows, each field as an attribute.
            tokens: Number of rows.
            rows: The checked rows of a run without a graph, which may have another width. A prefill
                has no front tokens.
        """
        capacity = self._capacity
        width, front, ragged = capacity.tokens_per_request, capacity.front_tokens, capacity.ragged
        if rows is None:
            self._inputs.check(batch, tokens, width, ragged, front)
        else:
            known_front = None if front else front
            self._inputs.check(batch, tokens, rows.width, ragged or rows.is_packed, known_front)

    def check(self, batch: Any) -> None:
        """Refuse a batch whose fields the graph cannot take.

        Raises:
            InputError: A field is missing, wrong or not captured, or contradicts another one;
                ``field`` names it.
        """
        requests, tokens = batch.batch_size, self.count_tokens(batch)
        surplus = self.surplus_field(batch)
        if surplus is not None:
            raise InputError(self.not_captured(surplus), field=surplus)
        self.check_width(requests, tokens)
        self.check_bound(batch)
        written = [layout for layout in self._layouts if layout.name not in self._bound_fields]
        values = {layout.name: getattr(batch, layout.name, None) for layout in written}
        self._validated(batch, written, values, requests, tokens)
        self.compare_fields(batch, tokens)

    def checked_rows(self, batch: Any, without: Collection[str] = ()) -> CheckedRows:
        """Return the rows of a batch for a run without a graph, every field checked.

        Args:
            batch: Live rows, of any number per request. With ``lengths``, they are packed.
            without: Optional fields that the batch omits.

        Raises:
            InputError: A field is missing or wrong, or contradicts another one; ``field`` names it.
        """
        capacity, requests = self._capacity, batch.batch_size
        tokens, lengths = self.count_tokens(batch), getattr(batch, "lengths", None)
        self.check_bound(batch)
        width = max(tokens // requests, 1)
        if self._inputs.width_is_fixed:
            width = capacity.tokens_per_request
        if not (capacity.ragged or lengths is not None):
            tokens = requests * width  # a number that is not a multiple is refused by its shape
        bound = {
            layout.name: layout.head(
                self._bound_fields[layout.name],
                min(layout.capacity, capacity.rows(layout.field.axis, requests, tokens)),
            )
            for layout in self._layouts
            if layout.name in self._bound_fields
        }
        values, fields = {}, []
        for field in fields_of(self._inputs):
            value = bound.get(field.name, getattr(batch, field.name, None))
            if value is not None or field.name not in (*self.absent, *without):
                values[field.name] = value
                fields.append(field)
        letters = {**capacity.letters, "W": width}
        layouts = resolve(tuple(fields), replace(capacity, requests=requests, letters=letters))
        tensors = self._validated(batch, layouts, values, requests, tokens)
        if lengths is not None:
            width = batch.width
            _check_spans(getattr(batch, "spans", None), requests, tokens)
        elif capacity.ragged:
            width = self._largest_width(batch, requests, tokens)
        rows = CheckedRows(tensors, width, lengths is not None)
        self.compare_fields(batch, tokens, rows)
        return rows

    def _validated(
        self,
        batch: Any,
        layouts: Sequence[FieldLayout],
        values: Mapping[str, Any],
        requests: int,
        tokens: int,
    ) -> dict[str, torch.Tensor]:
        """Return the value of each field as a tensor of its dtype and shape."""
        rows = {}
        for layout in layouts:
            count = self._capacity.rows(layout.field.axis, requests, tokens)
            try:
                rows[layout.name] = validate_field(layout, values[layout.name], count, self._device)
            except InputError as error:
                reason = wrong_count(error.field, batch, self._layouts)
                raise InputError(f"{error}{reason}", field=error.field) from error
        return rows

    def _largest_width(self, batch: Any, requests: int, tokens: int) -> int:
        """Return the largest number of rows of a request of a ragged batch, or an upper bound."""
        counts = self._inputs.row_counts(batch)
        if counts is None or not counts.size:
            return tokens - requests + 1
        return max(int(counts.max()), 1)


def _check_spans(spans: Sequence[range] | None, requests: int, tokens: int) -> None:
    """Refuse positions that are not those of all rows of a prefill."""
    if spans is not None and (len(spans) != requests or sum(map(len, spans)) != tokens):
        raise InputError(
            f"spans has {len(spans)} requests of {sum(map(len, spans))} rows, but the batch has "
            f"{requests} requests of {tokens} rows. Pass one range of positions per request.",
            field="spans",
        )
