"""Memory of a runner's inputs: the arena, the mailbox, and the refresh that connects them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import is_dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from graphkit.buffers.arena import Arena, refresh_copies, refresh_fetches, refresh_table
from graphkit.buffers.batch_checks import BatchChecks
from graphkit.buffers.inputs import StepInputs
from graphkit.buffers.layout import Capacity, FieldLayout, fields_of, resolve
from graphkit.buffers.mailbox import ENTRIES, Mailbox
from graphkit.buffers.value_checks import Limits, ValueChecks
from graphkit.buffers.writers import AxisWriters, BatchWriter, FieldWriter
from graphkit.config import require_type
from graphkit.errors import ConfigError, short_repr
from graphkit.ops.refresh import FROM_PAYLOAD, KEEP, Header, refresh


class InputBuffers:
    """Device memory and mailbox for the inputs of one runner.

    All memory is allocated at construction, for the largest size. Addresses never change, so a
    ``view`` stays valid as long as the buffers exist.

    Args:
        capacity: Rows at the largest size.
        device: Device of the arena.
        inputs_type: Class of the inputs.
        optional_fields: Optional fields to allocate. Other optional fields are ``None`` in views.
        without: Fields that this runner does not use. They are treated as omitted optional fields.
        bound_fields: Storage of fields whose live rows another graph writes in place, by name.
        check_device, wait_for_device: See ``Mailbox``.
        limits: Bounds of values, for the checking mode; ``None`` checks no values.

    Raises:
        ConfigError: An argument has a wrong type or names an unknown field, or a bound tensor does
            not fit.
    """

    def __init__(
        self,
        capacity: Capacity,
        device: torch.device,
        *,
        inputs_type: type[StepInputs],
        optional_fields: Collection[str] = (),
        without: Collection[str] = (),
        bound_fields: Mapping[str, torch.Tensor] | None = None,
        check_device: Callable[[], None] = lambda: None,
        wait_for_device: Callable[[], None] = lambda: None,
        limits: Limits | None = None,
    ) -> None:
        name = "InputBuffers"
        require_type(name, "capacity", capacity, Capacity, "a graphkit.Capacity")
        require_type(name, "device", device, torch.device, "a torch.device")
        self.capacity, self.device = capacity, device
        _check_inputs_type(inputs_type)
        self.inputs = inputs_type
        _check_names("without", without, [f.name for f in fields_of(self.inputs)])
        declared = [f for f in fields_of(self.inputs) if f.name not in without]
        _check_names("optional_fields", optional_fields, [f.name for f in declared if f.optional])
        _check_names(
            "bound_fields",
            {} if bound_fields is None else bound_fields,
            [f.name for f in declared],
            Mapping,
        )
        self.bound_fields = dict(bound_fields or {})
        present = [
            f
            for f in declared
            if not f.optional or f.name in {*optional_fields, *self.bound_fields}
        ]
        self.layouts: tuple[FieldLayout, ...] = resolve(present, capacity)
        self.checks = BatchChecks(
            inputs_type, self.layouts, capacity, device, frozenset(without), self.bound_fields
        )
        """Checks of batches, before a replay and before a run without a graph."""
        self.arena = Arena(self.layouts, self.bound_fields, device)
        self.mailbox = Mailbox(self.layouts, device, check_device, wait_for_device)
        written = [layout for layout in self.layouts if layout.name not in self.bound_fields]
        self._writers = [
            AxisWriters(self.mailbox, axis, [x for x in written if x.field.axis is axis], device)
            for axis in dict.fromkeys(layout.field.axis for layout in written)
        ]
        self.value_checks = (
            None if limits is None else ValueChecks(self.layouts, self.capacity, limits, device)
        )
        """Checks of values; ``None`` outside of the checking mode."""
        self._blank = self._make_blank()
        for entry in range(ENTRIES):
            self.pad_entry(entry)
        self._segments = [s for layout in self.layouts for s in self.arena.segments(layout)]
        self._table = refresh_table(self.layouts, self.arena).to(device)
        self._entry = torch.zeros(self.mailbox.entry_words, dtype=torch.int64, device=device)
        self._tables: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def view(self, batch_size: int) -> Any:
        """Return the first ``batch_size`` requests of every field, as views of the arena.

        Shapes:
            As documented by the inputs dataclass, with B = ``batch_size``.
        """
        rows: dict[str, Any] = {
            layout.name: self.live_rows(layout.name, batch_size) for layout in self.layouts
        }
        return self.inputs(**rows)

    def live_rows(self, name: str, batch_size: int, tokens: int | None = None) -> torch.Tensor:
        """Return the first rows of one field, as a view of its storage."""
        layout = next(layout for layout in self.layouts if layout.name == name)
        rows = min(self.capacity.rows(layout.field.axis, batch_size, tokens), layout.capacity)
        return layout.head(self.arena.tensors[name], rows)

    def prepare(self, batch_size: int) -> None:
        """Upload the tables that ``refresh`` reads for a size. Call it before a capture."""
        if batch_size not in self._tables:
            fetches = refresh_fetches(self.layouts, self.capacity, batch_size)
            copies = refresh_copies(self.layouts, self.capacity, batch_size)
            self._tables[batch_size] = fetches.to(self.device), copies.to(self.device)

    def refresh(self, batch_size: int) -> None:
        """Enqueue the refresh of a captured size. It consumes one mailbox entry when it runs."""
        refresh(
            self._segments,
            self.mailbox.ring,
            self.mailbox.device_sequence,
            self._table,
            self._entry,
            *self._tables[batch_size],
            ENTRIES,
            batch_size,
            batch_size * self.capacity.tokens_per_request,
        )
        if self.value_checks is not None:
            self.value_checks.enqueue(vars(self.view(batch_size)), is_padded=True)

    def refresh_tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors that the refresh works with, by name. Fields are not among them."""
        work = {
            f"{name} {size}": tensor
            for size, both in self._tables.items()
            for name, tensor in zip(("fetches", "copies"), both, strict=True)
        }
        sequence = self.mailbox.device_sequence
        own = {"sequence": sequence, "table": self._table, "entry": self._entry}
        checks = {} if self.value_checks is None else self.value_checks.tensors()
        return {"ring": self.mailbox.ring, **own, **work, **checks}

    def writer(self, entry: int, requests: int, tokens: int | None = None) -> BatchWriter:
        """Return the writer of a batch of that size into an entry. It leaves bound fields out."""
        fields: list[FieldWriter] = []
        for writers in self._writers:
            fields += writers[entry, self.capacity.rows(writers.axis, requests, tokens)]
        return BatchWriter(self.mailbox, fields)

    def pad_entry(self, entry: int) -> None:
        """Fill an entry with pads and mark its payload as the source of every field."""
        self.mailbox.fill(entry, self._blank)

    @contextmanager
    def posted(self, batch: Any = None) -> Iterator[None]:
        """Post a batch for a refresh that the block enqueues.

        Args:
            batch: Live rows; ``None`` posts an entry without live rows, so that the refresh writes
                pads only.
        """
        entry = self.mailbox.claim()
        if batch is None:
            in_flight: list[torch.Tensor] = []
            self.mailbox.post(entry, 0, 0, 0)
        else:
            tokens = self.checks.count_tokens(batch)
            in_flight = self.writer(entry, batch.batch_size, tokens).write(batch)
            self.mailbox.post(entry, batch.batch_size, tokens)
        yield
        self.mailbox.commit(in_flight)

    @contextmanager
    def replays_of_pads(self) -> Iterator[None]:
        """Let every replay of the block compute pads alone, without a posted batch.

        Entries otherwise hold earlier batches, whose addresses may be those of freed memory. The
        device must be idle at both ends of the block.
        """
        for entry in range(ENTRIES):
            self.pad_entry(entry)
            self.mailbox.post(entry, 0, 0, 0)
        try:
            yield
        finally:
            self.mailbox.rewind()

    def read(self, entry: int, requests: int, tokens: int, padded_batch_size: int) -> StepInputs:
        """Return a copy of a written batch, as a graph would read it. The entry stays unread.

        Waits for the device. Bound fields are left out.

        Args:
            entry: A written entry, the next one in turn.
            requests: Live requests in it.
            tokens: Live rows in it.
            padded_batch_size: Captured size to refresh.

        Returns:
            The inputs, with live rows on the device.
        """
        self.mailbox.post(entry, requests, tokens)
        self.prepare(padded_batch_size)
        self.refresh(padded_batch_size)
        rows: dict[str, Any] = {
            layout.name: self.live_rows(layout.name, requests, tokens).clone()
            for layout in self.layouts
            if layout.name not in self.bound_fields
        }
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.mailbox.unread()
        return self.inputs(**rows)

    def _make_blank(self) -> NDArray[np.int64]:
        """Return the content of an entry of pads, from its sources on."""
        words = torch.zeros(self.mailbox.entry_words, dtype=torch.int64)
        for layout in self.layouts:
            source = KEEP if layout.name in self.bound_fields else FROM_PAYLOAD
            first = Header.SOURCES + layout.first_segment
            words[first : first + layout.segments] = source
            if not layout.field.by_address:
                end = layout.payload + layout.total_bytes
                words.view(torch.uint8)[layout.payload : end].view(layout.dtype).fill_(layout.pad)
        return words[Header.SOURCES :].numpy().copy()


def _check_inputs_type(inputs_type: object) -> None:
    if not (isinstance(inputs_type, type) and is_dataclass(inputs_type)):
        raise ConfigError(
            "inputs_type must be a subclass of graphkit.StepInputs, got "
            f"{short_repr(inputs_type)}.",
            field="inputs_type",
        )


def _check_names(
    argument: str, names: Collection[str], known: Collection[str], kind: Any = Collection
) -> None:
    if not isinstance(names, kind) or isinstance(names, str):
        raise ConfigError(
            f"{argument} must be a {kind.__name__.lower()} of field names, got "
            f"{short_repr(names)}.",
            field=argument,
        )
    for name in names:
        if name not in known:
            raise ConfigError(
                f"{argument} names {name!r}; it may name {', '.join(sorted(known))}.",
                field=argument,
            )
