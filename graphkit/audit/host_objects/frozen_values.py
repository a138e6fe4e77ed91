"""Host numbers that have changed since a runner's capture, and that its graphs keep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any
from weakref import proxy

from graphkit.audit.host_objects.host_numbers import HostNumber, HostNumbers, value_text
from graphkit.errors import CaptureError, ReplayError
from graphkit.graphs import UNSET_MARKER, Attribution, gc_paused, inspect_graph
from graphkit.graphs.walk.canonical_nodes import CanonicalNode, canonical_nodes
from graphkit.graphs.walk.capture_differences import (
    CaptureDifference,
    capture_differences,
    differing_bytes,
)
from graphkit.records import Node
from graphkit.runners import FrozenValue

_ADVICE = "Read it from a tensor that every replay refreshes, or capture again."


class FrozenValues:
    """Finds the numbers that have changed since capture and that graphs keep.

    A change alone is not an error: the step is captured again with both values, and only a graph
    that differs keeps one. A number that a graph does not keep is not compared again for its size.

    Args:
        runner: Captures. Its forward has just been captured.
        forward: The forward, as the user passed it.
    """

    def __init__(self, runner: Any, forward: Any) -> None:
        self.numbers = HostNumbers(forward)
        self._runner = proxy(runner)  # a reference cycle would keep the graphs alive
        self._harmless: set[tuple[int, HostNumber]] = set()
        self._found: dict[tuple[int, HostNumber, str], FrozenValue | None] = {}

    def check(self, size: int) -> None:
        """Refuse a replay of a graph that keeps a number which has changed.

        Raises:
            ReplayError: Names the number, the node and its line.
        """
        found = self.find(size)
        if found:
            node = found[0].node
            origin = ", ".join(filter(None, (node.module, node.source))) if node else ""
            made_by = f" The node is made by {origin}." if origin else ""
            raise ReplayError(f"size {size}: {found[0].text}{made_by} {_ADVICE}")

    def find(self, size: int) -> list[FrozenValue]:
        """Return the numbers that have changed and that the graph of a size keeps.

        If a number has changed, waits for the device and captures the size again; outputs in the
        runner's pool become invalid.
        """
        changed = [n for n in self.numbers.changed() if (size, n) not in self._harmless]
        new = [n for n in changed if (size, n, n.now_text) not in self._found]
        if new:
            self._compare(size, changed, new)
        found = (self._found.get((size, number, number.now_text)) for number in changed)
        return [value for value in found if value is not None]

    def _compare(self, size: int, changed: Sequence[HostNumber], new: Sequence[HostNumber]) -> None:
        """Capture with the values of the capture, and with each new one."""
        before = {number: number.before for number in changed}
        now = {number: (number.now, number.now_text) for number in new}
        is_cuda = self._runner.device.type == "cuda"
        self._runner.backend.wait_for_device()
        with ExitStack() as kept:
            if is_cuda:
                kept.enter_context(gc_paused())
                with self.numbers.varied(before):  # kept, so that all others get the same memory
                    kept.enter_context(self._runner.recapture(batch_sizes=[size]))
            first, nodes = self._capture(size, before)
            again = [self._capture(size, before, UNSET_MARKER)[0]] if is_cuda else []
            unset = differing_bytes(first, *again)
            for number in new:
                value, after = now[number]
                try:
                    other, _ = self._capture(size, before | {number: value})
                except CaptureError:  # the forward does not run with this value, nor without graph
                    self._found[size, number, after] = None
                    continue
                difference = next(capture_differences(first, other, unset), None)
                if difference is None:
                    self._harmless.add((size, number))
                else:
                    self._found[size, number, after] = _frozen(number, after, difference, nodes)

    def _capture(
        self, size: int, values: Mapping[HostNumber, Any], stack_fill: int = 0
    ) -> tuple[Sequence[CanonicalNode], Sequence[Node]]:
        """Capture a size with some values, and return its nodes."""
        names = self._runner.memory_names()
        attribution = Attribution(stack_fill=stack_fill)
        with (
            self.numbers.varied(values),
            self._runner.recapture(batch_sizes=[size], attribution=attribution) as graphs,
        ):
            return canonical_nodes(graphs[size], names), inspect_graph(
                graphs[size], names=names
            ).nodes


def _frozen(
    number: HostNumber, after: str, difference: CaptureDifference, nodes: Sequence[Node]
) -> FrozenValue:
    node = nodes[difference.node] if difference.node < len(nodes) else None
    place = f"the {difference.what}"
    if node is not None and difference.argument is not None:
        place = f"argument {difference.argument} of `{node.short_name}` (node {node.index})"
    elif node is not None:
        place = f"{place} of node {node.index} (`{node.short_name}`)"
    before = value_text(number.before)
    text = (
        f"`{number.name}` has changed since capture ({before}, then {after}), and the "
        f"graph keeps its value in {place}."
    )
    return FrozenValue(number.name, before, after, text, node, difference.argument)
