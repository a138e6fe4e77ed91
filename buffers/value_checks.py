"""Checks of input values: on the host before a replay, and on the device inside the graph.

Shapes and dtypes are always checked. Values are checked in the checking mode only
(``GRAPHKIT_CHECK=1`` or ``Runner(check=True)``), because they cost kernels in every replay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from graphkit.buffers.accepted import host_floats, host_rows
from graphkit.buffers.layout import Capacity, FieldLayout
from graphkit.buffers.value_rules import Limits, Rule, value_rules
from graphkit.errors import InputError

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

        Args:
            batch: Live rows, each field as an attribute.

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
