"""The memory behind a mode's inputs: allocated once, at the largest size."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from graphkit.buffers.arena import Arena
from graphkit.buffers.fields import fields_of
from graphkit.buffers.inputs import Inputs
from graphkit.buffers.layout import Capacity, FieldLayout, resolve
from graphkit.buffers.mailbox import ENTRIES, Mailbox
from graphkit.buffers.refresh_table import refresh_copies, refresh_fetches, refresh_table
from graphkit.buffers.writers import AxisWriters, BatchWriter, FieldWriter
from graphkit.errors import ConfigError, InputError
from graphkit.ops.mailbox_layout import FROM_PAYLOAD, KEEP, Header
from graphkit.ops.refresh import refresh


class InputBuffers:
    """The arena, the mailbox and the refresh of one runner.

    Life: addresses are fixed from construction on; a ``view`` of any size stays valid.

    Args:
        capacity: Rows at the largest size.
        device: Where the arena lives.
        inputs_type: A subclass of the mode's inputs that declares further fields.
        optional_fields: Optional fields to allocate; the others stay ``None`` in every view.
        without: Fields that this runner has no use for, treated as optional ones left out.
        bound_fields: Storage of fields whose live rows another graph writes in place, by name.
        is_alive: See ``Mailbox``.

    Raises:
        ConfigError: ``optional_fields`` or ``bound_fields`` names an unknown field, or a bound
            tensor does not fit.
    """

    inputs_type: ClassVar[type[Inputs]] = Inputs

    def __init__(
        self,
        capacity: Capacity,
        device: torch.device,
        *,
        inputs_type: type[Inputs] | None = None,
        optional_fields: Collection[str] = (),
        without: Collection[str] = (),
        bound_fields: Mapping[str, torch.Tensor] | None = None,
        is_alive: Callable[[], None] = lambda: None,
    ) -> None:
        self.capacity, self.device = capacity, device
        self.inputs = inputs_type or type(self).inputs_type
        declared = [f for f in fields_of(self.inputs) if f.name not in without]
        _check_names("optional_fields", optional_fields, [f.name for f in declared if f.optional])
        _check_names(
            "bound_fields",
            {} if bound_fields is None else bound_fields,
            [f.name for f in declared],
            Mapping,
        )
        self.bound_fields, self._without = dict(bound_fields or {}), frozenset(without)
        present = [
            f
            for f in declared
            if not f.optional or f.name in {*optional_fields, *self.bound_fields}
        ]
        self.layouts: tuple[FieldLayout, ...] = resolve(present, capacity)
        self.absent = tuple(f.name for f in fields_of(self.inputs) if f not in present)
        """Fields that were not allocated."""
        self.arena = Arena(self.layouts, self.bound_fields, device)
        self.mailbox = Mailbox(self.layouts, device, is_alive)
        written = [layout for layout in self.layouts if layout.name not in self.bound_fields]
        self._writers = [
            AxisWriters(self.mailbox, axis, [x for x in written if x.field.axis is axis], device)
            for axis in dict.fromkeys(layout.field.axis for layout in written)
        ]
        self._blank = self._make_blank()
        for entry in range(ENTRIES):
            self.pad_entry(entry)
        self._segments = [s for layout in self.layouts for s in self.arena.segments(layout)]
        self._table = refresh_table(self.layouts, self.arena).to(device)
        self._state = torch.zeros(1, dtype=torch.int64, device=device)
        self._entry = torch.zeros(self.mailbox.entry_words, dtype=torch.int64, device=device)
        self._work: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def view(self, batch_size: int) -> Inputs:
        """The first ``batch_size`` requests of every field; aliases the arena.

        Shapes:
            as the inputs dataclass says, with B = ``batch_size``.
        """
        rows: dict[str, Any] = {
            layout.name: self.live_rows(layout.name, batch_size) for layout in self.layouts
        }
        return self.inputs(**rows)

    def live_rows(self, name: str, batch_size: int, tokens: int | None = None) -> torch.Tensor:
        """The first rows of one field; aliases its storage."""
        layout = next(layout for layout in self.layouts if layout.name == name)
        rows = min(self.capacity.rows(layout.field.axis, batch_size, tokens), layout.capacity)
        return layout.head(self.arena.tensors[name], rows)

    @cached_property
    def _batch_tells_tokens(self) -> bool:
        """Whether a batch brings a field that tells how many rows it has."""
        written = {layout.name for layout in self.layouts} - self.bound_fields.keys()
        return not written.isdisjoint(self.inputs.counted_by)

    def tokens_of(self, batch: Any) -> int:
        """Rows of a batch; as captured, if another graph writes every field that could tell."""
        if self._batch_tells_tokens:
            return int(batch.num_tokens)
        counts = self.inputs.row_counts(batch) if self.capacity.ragged else None
        if counts is not None:
            return int(counts.sum())
        return int(batch.batch_size * self.capacity.tokens_per_request)

    def not_captured(self, name: str) -> str:
        """What to do about a field that a batch brings although the graph does not read it."""
        if name in self._without:
            return (
                f"field {name!r} was not captured: the algorithm has no use for it. Leave it out."
            )
        return f"field {name!r} was not captured. Pass optional_fields=[{name!r}] to the runner."

    def check_bound(self, batch: Any) -> None:
        """Refuse rows of a bound field, which nobody would read; its own storage is let through."""
        for name, storage in self.bound_fields.items():
            rows = getattr(batch, name, None)
            is_own = isinstance(rows, torch.Tensor) and rows.data_ptr() == storage.data_ptr()
            if rows is not None and not is_own:
                raise InputError(
                    f"field {name!r} is bound: another graph writes its rows. Leave it out.",
                    field=name,
                )

    def check(self, batch: Any, tokens: int, width: int | None = None) -> None:
        """Refuse a batch that contradicts itself; see ``Inputs.check``.

        Args:
            batch: Its live rows.
            tokens: How many rows it has.
            width: Most rows of a request; as captured if left out.
        """
        most = self.capacity.tokens_per_request if width is None else width
        self.inputs.check(batch, tokens, most, self.capacity.ragged)

    def prepare(self, batch_size: int) -> None:
        """Upload what ``refresh`` needs for a size. Before any capture of it."""
        if batch_size not in self._work:
            fetches = refresh_fetches(self.layouts, self.capacity, batch_size)
            copies = refresh_copies(self.layouts, self.capacity, batch_size)
            self._work[batch_size] = fetches.to(self.device), copies.to(self.device)

    def refresh(self, batch_size: int) -> None:
        """Enqueue the refresh of a captured size. It consumes one mailbox entry when it runs."""
        refresh(
            self._segments,
            self.mailbox.ring,
            self._state,
            self._table,
            self._entry,
            *self._work[batch_size],
            ENTRIES,
            batch_size,
            batch_size * self.capacity.tokens_per_request,
        )

    def machinery(self) -> dict[str, torch.Tensor]:
        """The tensors by which the refresh works, by name; no field is among them."""
        work = {
            f"{name} {size}": tensor
            for size, both in self._work.items()
            for name, tensor in zip(("fetches", "copies"), both, strict=True)
        }
        own = {"sequence": self._state, "table": self._table, "entry": self._entry}
        return {"ring": self.mailbox.ring, **own, **work}

    def writer(self, entry: int, requests: int, tokens: int | None = None) -> BatchWriter:
        """What writes a batch of that size into an entry; bound fields are left out."""
        fields: list[FieldWriter] = []
        for writers in self._writers:
            fields += writers[entry, self.capacity.rows(writers.axis, requests, tokens)]
        return BatchWriter(fields)

    def pad_entry(self, entry: int) -> None:
        """Fill an entry's rows with pads and say that they are to be read from there."""
        self.mailbox.fill(entry, self._blank)

    def post(self, batch: Any) -> None:
        """Write a batch into the next entry and post it."""
        entry, tokens = self.mailbox.claim(), self.tokens_of(batch)
        in_flight = self.writer(entry, batch.batch_size, tokens).write(batch)
        self.mailbox.post(entry, batch.batch_size, tokens)
        self.mailbox.commit(in_flight)

    def post_idle(self) -> None:
        """Post an entry without live rows: the refresh then writes pads alone."""
        entry = self.mailbox.claim()
        self.mailbox.post(entry, 0, 0, 0)
        self.mailbox.commit()

    def _make_blank(self) -> NDArray[np.int64]:
        """An entry from its sources on, holding nothing but pads."""
        words = torch.zeros(self.mailbox.entry_words, dtype=torch.int64)
        for layout in self.layouts:
            source = KEEP if layout.name in self.bound_fields else FROM_PAYLOAD
            first = Header.SOURCES + layout.first_segment
            words[first : first + layout.segments] = source
            if not layout.field.on_device:
                end = layout.payload + layout.total_bytes
                words.view(torch.uint8)[layout.payload : end].view(layout.dtype).fill_(layout.pad)
        return words[Header.SOURCES :].numpy().copy()


def _check_names(
    argument: str, names: Collection[str], known: Collection[str], kind: Any = Collection
) -> None:
    if not isinstance(names, kind) or isinstance(names, str):
        raise ConfigError(
            f"{argument} must be a {kind.__name__.lower()} of field names, got {names!r}.",
            field=argument,
        )
    for name in names:
        if name not in known:
            raise ConfigError(
                f"{argument} names {name!r}; it may name {', '.join(sorted(known))}.",
                field=argument,
            )
