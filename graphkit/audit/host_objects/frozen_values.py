"""Host numbers and tensors that have changed since the capture of a runner, and that graphs keep.

A graph reads the memory of its capture. A setter that assigns another tensor, or another module,
therefore changes nothing in replays.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import proxy

import torch
from torch import nn

from graphkit.audit.host_objects.containers import Container
from graphkit.audit.host_objects.host_numbers import HostNumber, HostNumbers, value_text
from graphkit.audit.host_objects.reachable_objects import ReachableObjects
from graphkit.audit.stale_memory.pool_memory import tensor_range
from graphkit.errors import CaptureError, ReplayError
from graphkit.graphs.operations import has_storage
from graphkit.records import Node, tensor_text

if TYPE_CHECKING:
    from graphkit.records import Finding

_ADVICE = "Read it from a tensor that every replay refreshes, or capture again."
_TENSOR_ADVICE = "Write the new values into the tensor in place, or capture again."
_MOST_VALUES = 8
"""Most values of a string or a collection that are compared; one that has more counts as a log."""
_OF_THE_STEP = "pool", "input", "mailbox"
"""Kinds of memory that a graph does not keep from outside."""


@dataclass(frozen=True, slots=True)
class HeldTensor:
    """A tensor at a place that a forward reaches. Does not keep the tensor alive.

    Attributes:
        container, key: What holds it, and its key there.
        begin, end: Its first address, and the one after its last element.
        text: Its dtype and shape.
    """

    container: Container
    key: Any
    begin: int
    end: int
    text: str

    @property
    def name(self) -> str:
        """Path of the tensor, such as ``Model.head.weight``."""
        return self.container.name(self.key)

    @property
    def is_replaced(self) -> bool:
        """Whether another tensor is at its place now."""
        now = self.container.get(self.key)
        return isinstance(now, torch.Tensor) and has_storage(now) and now.data_ptr() != self.begin


class HeldTensors:
    """The tensors that a forward holds, as of construction."""

    def __init__(self, objects: ReachableObjects) -> None:
        self._tensors = [
            HeldTensor(
                container, key, *tensor_range(tensor), tensor_text(tensor.dtype, tensor.shape)
            )
            for container, key, tensor in objects.values_of(torch.Tensor)
            if has_storage(tensor) and not tensor.is_meta and tensor.numel()
        ]
        self._modules = list(objects.values_of(nn.Module))

    def keep_unchanged(self) -> None:
        """Forget the tensors that are replaced, such as those of each step's context."""
        replaced = {*map(id, self.replaced())}
        self._tensors = [tensor for tensor in self._tensors if id(tensor) not in replaced]

    def replaced(self) -> Sequence[HeldTensor]:
        """Return the tensors that are replaced, by themselves or with a module that holds them."""
        modules = tuple(
            f"{container.name(key)}."
            for container, key, module in self._modules
            if (now := container.get(key)) is not module and isinstance(now, nn.Module)
        )
        return [
            tensor
            for tensor in self._tensors
            if tensor.is_replaced or (modules and tensor.name.startswith(modules))
        ]


class FrozenValues:
    """Finds the numbers that have changed since capture and that graphs keep.

    A change alone is not an error: the step is captured again with both values, and only a graph
    that differs keeps one. A number that a graph does not keep is not compared again for its size,
    and another value, such as a string, only if it is a new one.
    A tensor that is replaced is an error if a node has an address in its memory.

    Args:
        runner: Captures. Its forward has just been captured.
        forward: The forward, as the user passed it.
        held: The tensors that it held before and after its capture; ``None`` compares none.
    """

    def __init__(self, runner: Any, forward: Any, held: HeldTensors | None = None) -> None:
        self._held = held
        self._unread: set[tuple[int, HeldTensor]] = set()
        self.numbers = HostNumbers(forward)
        self._runner = proxy(runner)  # a reference cycle would keep the graphs alive
        self._harmless: defaultdict[tuple[int, HostNumber], set[str]] = defaultdict(set)
        self._found: dict[tuple[int, HostNumber, str], Finding | None] = {}

    def check(self, size: int) -> None:
        """Refuse a replay of a graph that keeps a number which has changed."""
        frozen = self.find(size)
        if frozen:
            origin = ", ".join(filter(None, (frozen[0].module, frozen[0].source)))
            made_by = f" The node is made by {origin}." if origin else ""
            raise ReplayError(f"size {size}: {frozen[0].text}{made_by} {frozen[0].advice}")

    def find(self, size: int) -> list[Finding]:
        """Return the numbers and tensors that have changed and that the graph of a size keeps.

        If a number has changed, waits for the device and captures the size again; outputs in the
        runner's pool become invalid.
        """
        changed = [n for n in self.numbers.changed() if not self._is_harmless(size, n)]
        new = [n for n in changed if (size, n, n.now_text) not in self._found]
        if new:
            self._compare(size, changed, new)
        values = (self._found.get((size, number, number.now_text)) for number in changed)
        return [*filter(None, values), *self._replaced(size)]

    def _is_harmless(self, size: int, number: HostNumber) -> bool:
        """Return whether the graph of a size does not keep a number, which may be a counter."""
        values = self._harmless[size, number]
        most = 1 if type(number.before) in (int, float) else _MOST_VALUES
        return len(values) >= most or number.now_text in values

    def _replaced(self, size: int) -> Iterator[Finding]:
        """Yield the replaced tensors whose earlier memory the graph of a size reads."""
        held = self._held.replaced() if self._held is not None else ()
        replaced = [tensor for tensor in held if (size, tensor) not in self._unread]
        if not replaced:
            return
        # Loads when a tensor was replaced.
        from graphkit.audit.replayable_graph import Readers
        from graphkit.graphs import inspect_graph

        graph, names = self._runner.graphs[size], self._runner.memory_names()
        readers = Readers(inspect_graph(graph, names=names).nodes, _OF_THE_STEP)
        for tensor in replaced:
            node, argument = readers.first(tensor.begin, tensor.end)
            if node is None:
                self._unread.add((size, tensor))
                continue
            yield self._finding(
                size,
                f"`{tensor.name}` is another tensor than at capture, and the graph reads the "
                f"earlier one ({tensor.text}) in argument {argument} of `{node.short_name}` "
                f"(node {node.index}).",
                node,
                argument=argument,
                names=(tensor.name,),
                before=tensor.text,
                after="another tensor",
                advice=_TENSOR_ADVICE,
            )

    def _finding(self, size: int, text: str, node: Node | None, **facts: Any) -> Finding:
        from graphkit.audit.audit_log import Check
        from graphkit.audit.finding_kinds import FindingKind
        from graphkit.records.audit import Audit

        check = Check(Audit.FROZEN, self._runner.mode.name, size)
        check.report(FindingKind.FROZEN_VALUE, text, node=node, **facts)
        return check.findings[0]

    def _compare(self, size: int, changed: Sequence[HostNumber], new: Sequence[HostNumber]) -> None:
        """Capture with the values of the runner's capture, and with each new value."""
        # Loads when a number has changed, which is rare.
        from graphkit.audit.capture_differences import location
        from graphkit.audit.recaptures import Change, Recaptures

        def with_values(values: Mapping[HostNumber, Any]) -> Change:
            return Change(partial(self.numbers.varied, values))

        before = {number: number.before for number in changed}
        changes = [
            (number, number.now_text, with_values(before | {number: number.now})) for number in new
        ]
        runner: Any = self._runner
        recaptures = Recaptures(runner, start=with_values(before), batch_sizes=[size])
        runner.backend.wait_for_device()
        with recaptures.first_kept():
            baseline = recaptures.baseline(is_repeated=True)
            for number, text, change in changes:
                try:
                    by_size = recaptures.differences(baseline, change)
                except CaptureError:  # the forward does not run with this value, nor without graph
                    self._found[size, number, text] = None
                    continue
                differences = recaptures.confirmed(baseline, change, by_size)[size]
                if not differences:
                    self._harmless[size, number].add(text)
                    continue
                first, nodes = differences[0], baseline.records[size]
                before_text = value_text(number.before)
                facts = first.facts(nodes) | {"before": before_text, "after": text}
                self._found[size, number, text] = self._finding(
                    size,
                    f"`{number.name}` has changed since capture ({before_text}, then {text}), and "
                    f"the graph keeps its value in {location(first, nodes)}.",
                    names=(number.name,),
                    advice=_ADVICE,
                    **facts,
                )
