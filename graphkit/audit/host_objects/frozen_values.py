"""Host numbers and tensors that have changed since a runner's capture, and that its graphs keep."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any
from weakref import proxy

from graphkit.audit.host_objects.held_tensors import HeldTensor, HeldTensors
from graphkit.audit.host_objects.host_numbers import HostNumber, HostNumbers, value_text
from graphkit.errors import CaptureError, ReplayError
from graphkit.records import Node
from graphkit.runners.capture_checks import FrozenValue

_ADVICE = "Read it from a tensor that every replay refreshes, or capture again."
_TENSOR_ADVICE = "Write the new values into the tensor in place, or capture again."
_OF_THE_STEP = "pool", "input", "mailbox"
"""Kinds of memory that a graph does not keep from outside."""


class FrozenValues:
    """Finds the numbers that have changed since capture and that graphs keep.

    A change alone is not an error: the step is captured again with both values, and only a graph
    that differs keeps one. A number that a graph does not keep is not compared again for its size.
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
        self._harmless: set[tuple[int, HostNumber]] = set()
        self._found: dict[tuple[int, HostNumber, str], FrozenValue | None] = {}

    def check(self, size: int) -> None:
        """Refuse a replay of a graph that keeps a number which has changed.

        Raises:
            ReplayError: Names the number or tensor, the node and its line.
        """
        frozen = self.find(size)
        if frozen:
            node = frozen[0].node
            origin = ", ".join(filter(None, (node.module, node.source))) if node else ""
            made_by = f" The node is made by {origin}." if origin else ""
            raise ReplayError(f"size {size}: {frozen[0].text}{made_by} {frozen[0].advice}")

    def find(self, size: int) -> list[FrozenValue]:
        """Return the numbers and tensors that have changed and that the graph of a size keeps.

        If a number has changed, waits for the device and captures the size again; outputs in the
        runner's pool become invalid.
        """
        changed = [n for n in self.numbers.changed() if (size, n) not in self._harmless]
        new = [n for n in changed if (size, n, n.now_text) not in self._found]
        if new:
            self._compare(size, changed, new)
        values = (self._found.get((size, number, number.now_text)) for number in changed)
        return [*filter(None, values), *self._replaced(size)]

    def _replaced(self, size: int) -> Iterator[FrozenValue]:
        """Yield the replaced tensors whose earlier memory the graph of a size reads."""
        held = self._held.replaced() if self._held is not None else ()
        replaced = [tensor for tensor in held if (size, tensor) not in self._unread]
        if not replaced:
            return
        from graphkit.graphs import inspect_graph  # loads when a tensor was replaced

        graph, names = self._runner.graphs[size], self._runner.memory_names()
        nodes = inspect_graph(graph, names=names).nodes
        for tensor in replaced:
            place = next(_readers(nodes, tensor), None)
            if place is None:
                self._unread.add((size, tensor))
                continue
            node, argument = place
            yield FrozenValue(
                tensor.name,
                tensor.text,
                "another tensor",
                f"`{tensor.name}` is another tensor than at capture, and the graph reads the "
                f"earlier one ({tensor.text}) in argument {argument} of `{node.short_name}` "
                f"(node {node.index}).",
                node,
                argument,
                _TENSOR_ADVICE,
            )

    def _compare(self, size: int, changed: Sequence[HostNumber], new: Sequence[HostNumber]) -> None:
        """Capture with the values of the runner's capture, and with each new value.

        Args:
            size: The size.
            changed: The numbers that have changed since the runner's capture.
            new: Those of them to compare.
        """
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
            baseline = recaptures.baseline()
            for number, text, change in changes:
                try:
                    by_size = recaptures.differences(baseline, change)
                except CaptureError:  # the forward does not run with this value, nor without graph
                    self._found[size, number, text] = None
                    continue
                differences = recaptures.confirmed(baseline, change, by_size)[size]
                if not differences:
                    self._harmless.add((size, number))
                    continue
                first, nodes = differences[0], baseline.records[size]
                before_text = value_text(number.before)
                self._found[size, number, text] = FrozenValue(
                    number.name,
                    before_text,
                    text,
                    f"`{number.name}` has changed since capture ({before_text}, then {text}), and "
                    f"the graph keeps its value in {location(first, nodes)}.",
                    nodes[first.node] if first.node < len(nodes) else None,
                    first.argument,
                    _ADVICE,
                )


def _readers(nodes: Sequence[Node], tensor: HeldTensor) -> Iterator[tuple[Node, int]]:
    """Yield the nodes and the arguments that have an address in the memory of a tensor."""
    for node in nodes:
        for index, argument in enumerate(node.arguments):
            for pointer in argument.pointers:
                is_inside = tensor.begin <= pointer.address < tensor.end
                if is_inside and pointer.memory not in _OF_THE_STEP:
                    yield node, index
