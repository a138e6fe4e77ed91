"""Checks of input values: on the host before a replay, and on the device inside the graph.

Shapes and dtypes are always checked. Values are checked in the checking mode only
(``GRAPHKIT_CHECK=1`` or ``Runner(check=True)``), because they cost kernels in every replay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graphkit.buffers.accepted import host_floats, host_rows
from graphkit.buffers.layout import FieldLayout
from graphkit.errors import InputError

_NONE = -1
Bad = tuple[torch.Tensor, torch.Tensor]
"""Which elements break a rule, bool, and their values; both one-dimensional."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of index values.

    Attributes:
        context_len: Most tokens of a request.
        vocab_size: Size of the target's vocabulary.
        request_rows: Rows of the request pool, row 0 included; ``None`` if unknown.
        kv_slots: Slots of the KV pool, slot 0 included; ``None`` if unknown.
    """

    context_len: int
    vocab_size: int
    request_rows: int | None = None
    kv_slots: int | None = None


@dataclass(frozen=True, slots=True)
class _Rule:
    field: str
    expected: str
    find: Callable[[torch.Tensor], Bad]


class ValueChecks:
    """Checks the values of a runner's inputs.

    Rows, slots, positions, token ids and lengths must be in range, KV slots must not repeat, and
    floating-point fields must be finite. Pad rows pass every check.

    Args:
        layouts: Layouts of the fields.
        limits: Bounds of index values.
        device: Device of the views.
    """

    def __init__(
        self, layouts: Sequence[FieldLayout], limits: Limits, device: torch.device
    ) -> None:
        self._rules = [rule for layout in layouts for rule in _rules(layout, limits)]
        count = max(len(self._rules), 1)
        self._found = torch.full((2, count), _NONE, dtype=torch.float64, device=device)
        is_cuda = device.type == "cuda"
        self._on_host = torch.full((2, count), _NONE, dtype=torch.float64, pin_memory=is_cuda)
        self._flags = self._on_host[0].numpy()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors that the checks work with, by name."""
        return {"value checks": self._found, "value checks, host": self._on_host}

    def enqueue(self, fields: Mapping[str, torch.Tensor]) -> None:
        """Check tensors on the device. May be captured; does not synchronise.

        The first violation of each rule is kept until ``report``.
        """
        for index, rule in enumerate(self._rules):
            if rule.field not in fields:
                continue
            bad, values = rule.find(fields[rule.field])
            first = bad.int().argmax()
            is_new = bad.any() & (self._found[0, index] == _NONE)
            value = values.index_select(0, first.view(1))[0].double()
            self._found[0, index].copy_(torch.where(is_new, first, self._found[0, index]))
            self._found[1, index].copy_(torch.where(is_new, value, self._found[1, index]))
        self._on_host.copy_(self._found, non_blocking=True)

    def report(self) -> None:
        """Raise for a violation that the device found in an earlier replay, and forget it.

        Reads host memory only. A replay that is still in flight is reported by a later call.

        Raises:
            InputError: An earlier replay read a wrong value; ``field`` names the field.
        """
        for index, flag in enumerate(self._flags[: len(self._rules)].tolist()):
            if flag != _NONE:
                value = float(self._on_host[1, index])
                self._found.fill_(_NONE)
                self._on_host.copy_(self._found)
                raise _violation(self._rules[index], value, "an earlier replay")

    def check(self, batch: Any) -> None:
        """Check the fields of a batch whose values the host can read without waiting.

        Args:
            batch: Live rows, each field as an attribute.

        Raises:
            InputError: A value is wrong; ``field`` names the field.
        """
        for rule in self._rules:
            value = getattr(batch, rule.field, None)
            rows = host_floats(value) if rule.find is _not_finite else host_rows(value)
            if rows is not None:
                self._raise_first(rule, torch.as_tensor(rows), "this batch")

    def check_now(self, fields: Mapping[str, torch.Tensor]) -> None:
        """Check tensors on any device. Waits for the device.

        Raises:
            InputError: A value is wrong; ``field`` names the field.
        """
        for rule in self._rules:
            if rule.field in fields:
                self._raise_first(rule, fields[rule.field], "this batch")

    def _raise_first(self, rule: _Rule, rows: torch.Tensor, whose: str) -> None:
        if rows.numel():
            bad, values = rule.find(rows)
            if bool(bad.any()):
                raise _violation(rule, float(values[int(bad.int().argmax())]), whose)


def _rules(layout: FieldLayout, limits: Limits) -> Iterator[_Rule]:
    name = layout.name
    bounds: dict[str, tuple[str, int | None]] = {
        "req_pool_indices": ("a row of the request pool", limits.request_rows),
        "out_cache_loc": ("a slot of the KV pool", limits.kv_slots),
        "seq_lens": ("a length within max_context_len", limits.context_len + 1),
        "positions": ("a position within max_context_len", limits.context_len),
        "input_ids": ("a token id", limits.vocab_size),
        "topk_index": ("a token id", limits.vocab_size),
    }
    counts: dict[str, tuple[str, int]] = {
        "extend_seq_lens": ("rows of a request", 1),
        "num_accepted_tokens": ("accepted tokens of a request", 1),
        "num_accepted_drafts": ("accepted drafts of a request", 0),
    }
    if name in counts:
        meaning, least = counts[name]
        last = limits.context_len  # a prefill has more rows than a step
        yield _Rule(name, f"{meaning}, {least} to {last}", _outside(least, last))
    if name in bounds:
        meaning, end = bounds[name]
        last = 2**62 if end is None else end - 1
        text = "at least 0" if end is None else f"0 to {last}"
        yield _Rule(name, f"{meaning}, {text}", _outside(0, last))
    if name == "out_cache_loc":
        yield _Rule(name, "each slot at most once", _repeated)
    if layout.dtype.is_floating_point:
        yield _Rule(name, "finite numbers", _not_finite)


def _outside(low: int, high: int) -> Callable[[torch.Tensor], Bad]:
    def find(rows: torch.Tensor) -> Bad:
        values = rows.flatten()
        return (values < low) | (values > high), values

    return find


def _repeated(rows: torch.Tensor) -> Bad:
    """Find slots that occur twice; slot 0 takes the writes of all pad rows."""
    ordered = rows.flatten().sort().values
    before = ordered.roll(1)
    before[:1] = 0
    return (ordered == before) & (ordered != 0), ordered


def _not_finite(rows: torch.Tensor) -> Bad:
    values = rows.flatten()
    return ~values.isfinite(), values


def _violation(rule: _Rule, value: float, whose: str) -> InputError:
    shown = int(value) if value.is_integer() else value
    return InputError(
        f"field {rule.field!r} of {whose} contains {shown}. Expected {rule.expected}.",
        field=rule.field,
    )
