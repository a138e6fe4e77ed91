"""Checks of input values by rules: on the host before a replay, and on the device inside the graph.

Shapes and dtypes are always checked. Values are checked in the checking mode only
(``GRAPHKIT_CHECK=1`` or ``Runner(check=True)``), because they cost kernels in every replay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graphkit.buffers.accepted import host_floats, host_rows
from graphkit.buffers.layout import Capacity, FieldLayout
from graphkit.errors import InputError

_NO_END = 2**62
"""Larger than any index, where the end of a range is not known."""
Bounds = dict[str, tuple[str, int, int | None]]
"""By field: meaning, least value and end of the range; ``None`` where the end is not known."""
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
class Rule:
    """A rule for the values of a field.

    Attributes:
        field: The field.
        expected: What its values must be, for messages.
        find: Returns the values that break the rule, from the tensors of ``field`` and ``others``.
        others: Fields that the values must agree with.
        is_float: Whether the field has floating-point numbers.
        is_padded: Whether the rule is for padded batches alone.
    """

    field: str
    expected: str
    find: Callable[..., Bad]
    others: tuple[str, ...] = ()
    is_float: bool = False
    is_padded: bool = False

    def tensors(self, fields: Mapping[str, torch.Tensor]) -> list[torch.Tensor] | None:
        """Return what ``find`` reads; ``None`` if a field is missing."""
        names = (self.field, *self.others)
        return [fields[name] for name in names] if fields.keys() >= set(names) else None


def value_rules(layouts: Sequence[FieldLayout], capacity: Capacity, limits: Limits) -> list[Rule]:
    """Return the rules of all fields."""
    fields, bounds = {layout.name for layout in layouts}, _bounds(limits)
    return [
        *(rule for layout in layouts for rule in _field_rules(layout, bounds)),
        *_agreement_rules(fields, capacity),
    ]


def _bounds(limits: Limits) -> Bounds:
    lengths_end = limits.context_len + 1
    return {
        "req_pool_indices": ("a row of the request pool", 0, limits.request_rows),
        "out_cache_loc": ("a slot of the KV pool", 0, limits.kv_slots),
        "seq_lens": ("a length within max_context_len", 0, lengths_end),
        "positions": ("a position within max_context_len", 0, limits.context_len),
        "input_ids": ("a token id", 0, limits.vocab_size),
        "topk_index": ("a token id", 0, limits.vocab_size),
        # A prefill has more rows than a step.
        "extend_seq_lens": ("rows of a request", 1, lengths_end),
        "num_accepted_tokens": ("accepted tokens of a request", 1, lengths_end),
        "num_accepted_drafts": ("accepted drafts of a request", 0, lengths_end),
    }


def _field_rules(layout: FieldLayout, bounds: Bounds) -> Iterator[Rule]:
    name = layout.name
    if name in bounds:
        meaning, least, end = bounds[name]
        last = _NO_END if end is None else end - 1
        text = f"at least {least}" if end is None else f"{least} to {last}"
        yield Rule(name, f"{meaning}, {text}", _outside(least, last))
    if name == "out_cache_loc":
        yield Rule(name, "each slot at most once", _repeated)
    if layout.dtype.is_floating_point:
        yield Rule(name, "finite numbers", _not_finite, is_float=True)


def _agreement_rules(fields: set[str], capacity: Capacity) -> Iterator[Rule]:
    """Yield rules by which fields agree with each other and with the width of a step.

    The host checks them in every replay where it can read the values; see ``StepInputs.check``.
    """
    drafts, tokens, lengths = "num_accepted_drafts", "num_accepted_tokens", "extend_seq_lens"
    width = capacity.tokens_per_request
    for name in (tokens, lengths):
        if name in fields:
            expected = f"1 to {width}, the rows of a request"
            yield Rule(name, expected, _outside(1, width), is_padded=True)
    if {drafts, tokens} <= fields:
        yield Rule(tokens, "num_accepted_drafts + 1", _other_than(1), (drafts,))
    if capacity.ragged and {tokens, lengths} <= fields:
        yield Rule(
            lengths, "num_accepted_tokens, the rows of the request", _other_than(0), (tokens,)
        )
    others = ("req_pool_indices", tokens, "input_ids")
    if {"select_index", *others} <= fields:
        front = capacity.front_tokens
        expected = "the row of the last accepted token of each request"
        # A prefill has no front tokens.
        yield Rule("select_index", expected, _other_row(front), others, is_padded=front > 0)


def _other_than(more: int) -> Callable[[torch.Tensor, torch.Tensor], Bad]:
    """Find rows that differ from the other field plus ``more``."""

    def find(rows: torch.Tensor, others: torch.Tensor) -> Bad:
        return rows != others + more, rows

    return find


def _other_row(front_tokens: int) -> Callable[..., Bad]:
    """Find requests that do not select the row of their last accepted token.

    A pad request has request row 0, and selects row 0. In a prefill rows are packed and all are
    accepted.
    """

    def find(
        select: torch.Tensor, request_rows: torch.Tensor, tokens: torch.Tensor, ids: torch.Tensor
    ) -> Bad:
        width = len(ids) // max(len(select), 1)
        starts = torch.arange(len(select), device=select.device) * width
        starts = torch.where(tokens.sum() == len(ids), tokens.cumsum(0) - tokens, starts)
        return (select != starts + front_tokens + tokens - 1) & (request_rows != 0), select

    return find


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


_NONE = -1
"""In place of a row: no violation was found."""


class ValueChecks:
    """Checks the values of a runner's inputs.

    Rows, slots, positions, token ids and lengths must be in range, KV slots must not repeat, counts
    and selected rows must agree, and floating-point fields must be finite. Pad rows pass every
    check.

    Args:
        layouts: Layouts of the fields.
        capacity: Capacity of the buffers.
        limits: Bounds of index values.
        device: Device of the tensors that ``enqueue`` checks.
    """

    def __init__(
        self,
        layouts: Sequence[FieldLayout],
        capacity: Capacity,
        limits: Limits,
        device: torch.device,
    ) -> None:
        self._rules = value_rules(layouts, capacity, limits)
        count = max(len(self._rules), 1)
        # By rule: the first row that breaks it, or _NONE, and the value there. float64 holds both.
        self._found = torch.full((2, count), _NONE, dtype=torch.float64, device=device)
        is_cuda = device.type == "cuda"
        self._on_host = torch.full((2, count), _NONE, dtype=torch.float64, pin_memory=is_cuda)
        self._flags = self._on_host[0].numpy()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors that the checks work with, by name."""
        return {"value checks": self._found, "value checks, host": self._on_host}

    def enqueue(self, fields: Mapping[str, torch.Tensor], *, is_padded: bool) -> None:
        """Check tensors on the device. May be captured; does not synchronise.

        The first violation of each rule is kept until ``report``.

        Args:
            fields: Rows of each field, by name.
            is_padded: Whether the batch has pad rows; some rules are for such batches alone.
        """
        for index, rule in enumerate(self._rules):
            tensors = rule.tensors(fields)
            if tensors is None or (rule.is_padded and not is_padded):
                continue
            bad, values = rule.find(*tensors)
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

        Raises:
            InputError: A value is wrong; ``field`` names the field.
        """
        for rule in self._rules:
            if rule.others or rule.is_padded:  # ``StepInputs.check`` has checked these
                continue
            value = getattr(batch, rule.field, None)
            rows = host_floats(value) if rule.is_float else host_rows(value)
            if rows is not None:
                _raise_first(rule, [torch.as_tensor(rows)])

    def check_now(self, fields: Mapping[str, torch.Tensor]) -> None:
        """Check the tensors of an unpadded batch, on any device. Waits for the device.

        Raises:
            InputError: A value is wrong; ``field`` names the field.
        """
        for rule in self._rules:
            tensors = rule.tensors(fields)
            if tensors is not None and not rule.is_padded:
                _raise_first(rule, tensors)


def _raise_first(rule: Rule, tensors: Sequence[torch.Tensor]) -> None:
    if tensors[0].numel():
        bad, values = rule.find(*tensors)
        if bool(bad.any()):
            raise _violation(rule, float(values[int(bad.int().argmax())]), "this batch")


def _violation(rule: Rule, value: float, whose: str) -> InputError:
    shown = int(value) if value.is_integer() else value
    return InputError(
        f"field {rule.field!r} of {whose} contains {shown}. Expected {rule.expected}.",
        field=rule.field,
    )
