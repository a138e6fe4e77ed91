"""Fields of any kind, batches of them, and what a refresh must leave behind, by plain loops."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from graphkit.buffers import (
    Axis,
    Capacity,
    FieldWriter,
    InputBuffers,
    TargetVerifyInputs,
    declare,
    fields_of,
    mailbox,
    resolve,
)
from graphkit.ops.refresh import Header

CPU = torch.device("cpu")


def _capacity(requests=4, width=4, *, hidden=8, dtype=torch.float32, fill=1):
    letters = {"W": width, "K": 2, "S": 3, "H": hidden, "D": 3 * hidden, "M": 2}
    return Capacity(requests, width, letters, dtype, fill)


def _inputs_type(base=None, **declared):
    """A dataclass with these declarations, after those of ``base``."""
    made = [(name, object, field) for name, field in declared.items()]
    bases = (base,) if base else ()
    return dataclasses.make_dataclass("Made", made, bases=bases, kw_only=True, eq=False)


def _random(shape, dtype, seed):
    """Any bytes at all: what is copied must not be looked at."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(2, shape, generator=generator).bool()
    count = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.randint(256, (count,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype).view(shape)


def _same_bytes(a, b):
    return a.dtype is b.dtype and torch.equal(
        a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8)
    )


@dataclass(frozen=True)
class Part:
    """A field, and where a batch's rows of it come from: payload, address, on_device or bound."""

    axis: Axis
    dtype: torch.dtype
    row: tuple[int, ...] = ()
    lead: int = 0
    pad: int | bool = 0
    source: str = "payload"
    offset: int = 0
    """Elements by which a source address is off its allocation."""


class Case:
    """Buffers of some parts, and one refresh of them after the other."""

    def __init__(self, parts, *, requests, width):
        self.parts = {f"f{i}": part for i, part in enumerate(parts)}
        declared = {
            name: declare(
                part.axis, part.dtype, "any", pad=part.pad, row=part.row, lead=part.lead,
                by_address=part.source == "on_device",
            )
            for name, part in self.parts.items()
        }  # fmt: skip
        inputs_type, capacity = _inputs_type(**declared), _capacity(requests, width)
        self.bound = {
            layout.name: torch.zeros(layout.shape(layout.capacity), dtype=layout.dtype)
            for layout in resolve(fields_of(inputs_type), capacity)
            if self.parts[layout.name].source == "bound"
        }
        self.buffers = InputBuffers(capacity, CPU, inputs_type=inputs_type, bound_fields=self.bound)
        self.turns = 0

    def turn(self, live, padded):
        """Post a batch, refresh, and look at every row of every field."""
        before, given, kept = self._scramble(), {}, []
        entry = self.buffers.mailbox.claim()
        for i, layout in enumerate(self.buffers.layouts):
            if layout.name not in self.bound:
                rows = _random(self._shape(layout, live), layout.dtype, 7 * self.turns + i)
                given[layout.name] = self._misaligned(rows, self.parts[layout.name].offset)
                kept.append(self._write(layout, entry, given[layout.name]))
        self.buffers.mailbox.post(entry, live, live * self.buffers.capacity.tokens_per_request)
        self.buffers.prepare(padded)
        self.buffers.refresh(padded)
        self.buffers.mailbox.commit(kept)
        self.turns += 1
        for layout in self.buffers.layouts:
            expected = self._expected(
                layout, before[layout.name], given.get(layout.name), live, padded
            )
            got = self.buffers.arena.tensors[layout.name]
            assert _same_bytes(got, expected), (self.parts[layout.name], live, padded)
        assert self.buffers.mailbox.ring[:2].tolist() == [self.turns, 0]

    def _scramble(self):
        for i, tensor in enumerate(self.buffers.arena.tensors.values()):
            tensor.copy_(_random(tensor.shape, tensor.dtype, 1000 + 7 * self.turns + i))
        return {name: tensor.clone() for name, tensor in self.buffers.arena.tensors.items()}

    def _shape(self, layout, requests):
        return layout.shape(self.buffers.capacity.rows(layout.field.axis, requests))

    def _write(self, layout, entry, rows):
        mailbox = self.buffers.mailbox
        if self.parts[layout.name].source != "address":
            return FieldWriter(mailbox, entry, layout, rows.shape[layout.dim], CPU).write(rows)
        step = rows.numel() // layout.segments * rows.dtype.itemsize
        for i in range(layout.segments):
            word = Header.SOURCES + layout.first_segment + i
            mailbox.point(entry, word, rows.data_ptr() + i * step)
        return rows

    @staticmethod
    def _misaligned(rows, offset):
        room = torch.empty(rows.numel() + offset, dtype=rows.dtype)
        return room[offset:].view(rows.shape).copy_(rows)

    def _expected(self, layout, before, given, live, padded):
        after = before.clone()
        for lead in range(layout.segments):
            target = after[lead] if layout.field.lead else after
            for row in range(layout.capacity):
                if row < self._shape(layout, live)[layout.dim]:
                    if given is not None:
                        target[row] = (given[lead] if layout.field.lead else given)[row]
                elif row < self._shape(layout, padded)[layout.dim]:
                    target[row] = layout.pad
        return after


@pytest.fixture(autouse=True, scope="module")
def give_up_soon():
    """Let an endless wait, which is a bug, fail after two seconds instead of a minute."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mailbox, "_GIVE_UP_S", 2.0)
        yield


@pytest.fixture(scope="session")
def make_capacity():
    """``make_capacity(requests, width, hidden=, dtype=, fill=)``."""
    return _capacity


@pytest.fixture(scope="session")
def make_inputs():
    """``make_inputs(base, name=declare(...), ...)`` makes an inputs dataclass."""
    return _inputs_type


@pytest.fixture(scope="session")
def make_part():
    """The class :class:`Part`."""
    return Part


@pytest.fixture(scope="session")
def make_case():
    """The class :class:`Case`."""
    return Case


@pytest.fixture(scope="session")
def verify_layouts():
    """The layouts of all fields of TargetVerifyInputs, by name: 4 requests of 4 rows, hidden 8."""
    return {layout.name: layout for layout in resolve(fields_of(TargetVerifyInputs), _capacity())}


@pytest.fixture
def make_buffers():
    """``make_buffers(**options)``: TARGET_VERIFY's, 4 requests of 4 rows, hidden 8."""
    verify = {"inputs_type": TargetVerifyInputs}
    return lambda **options: InputBuffers(_capacity(), CPU, **verify | options)


@pytest.fixture(scope="session")
def make_batch():
    """``make_batch(requests, first=, **fields)``: rows that count up from ``first``."""

    def make(requests, first=1, **more):
        tokens = np.arange(first, first + requests * 4)
        rows = dict.fromkeys(("input_ids", "positions", "out_cache_loc"), tokens)
        rows |= {"req_pool_indices": tokens[:requests], "seq_lens": tokens[:requests]}
        return TargetVerifyInputs(**{**rows, **more})

    return make


@pytest.fixture(scope="session")
def pass_on():
    """``pass_on(buffers, batch, padded)``: one replay's worth of buffer work; gives the view."""

    def pass_on(buffers, given, padded):
        entry = buffers.mailbox.claim()
        kept = buffers.writer(entry, given.batch_size).write(given)
        buffers.mailbox.post(entry, given.batch_size, given.batch_size * 4)
        buffers.mailbox.commit(kept)
        buffers.prepare(padded)
        buffers.refresh(padded)
        return buffers.view(padded)

    return pass_on
