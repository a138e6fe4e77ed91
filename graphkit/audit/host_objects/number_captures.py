"""Captures of a size with different host numbers, which show what a graph keeps of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from graphkit.audit.canonical_nodes import CanonicalNode, canonical_nodes
from graphkit.audit.capture_differences import (
    CaptureDifference,
    capture_differences,
    differing_bytes,
)
from graphkit.audit.host_objects.host_numbers import HostNumber, HostNumbers, value_text
from graphkit.errors import CaptureError
from graphkit.graphs import UNSET_MARKER, Attribution, gc_paused, inspect_graph
from graphkit.records import Node
from graphkit.runners import FrozenValue


class NumberCaptures:
    """Captures a size of a runner again, with other values of the numbers that its forward reads.

    Args:
        runner: The runner, captured.
        numbers: The numbers that its forward can read.
        size: The size.
    """

    def __init__(self, runner: Any, numbers: HostNumbers, size: int) -> None:
        self._runner, self._numbers, self._size = runner, numbers, size

    def compare(
        self, changed: Sequence[HostNumber], new: Sequence[HostNumber]
    ) -> tuple[list[HostNumber], dict[HostNumber, FrozenValue | None]]:
        """Capture with the values of the runner's capture, and with each new value.

        Args:
            changed: The numbers that have changed since the runner's capture.
            new: Those of them to compare.

        Returns:
            The numbers that the graph does not keep, and the frozen value of each other one;
            ``None`` for a value with which the forward does not run.
        """
        before = {number: number.before for number in changed}
        now = {number: (number.now, number.now_text) for number in new}
        is_cuda = self._runner.device.type == "cuda"
        harmless, frozen = list[HostNumber](), dict[HostNumber, FrozenValue | None]()
        self._runner.backend.wait_for_device()
        with ExitStack() as kept:
            if is_cuda:
                kept.enter_context(gc_paused())
                with self._numbers.varied(before):  # kept, so that all others get the same memory
                    kept.enter_context(self._runner.recapture(batch_sizes=[self._size]))
            first, nodes = self._capture(before)
            again = [self._capture(before, UNSET_MARKER)[0]] if is_cuda else []
            unset = differing_bytes(first, *again)
            for number, (value, after) in now.items():
                try:
                    other, _ = self._capture(before | {number: value})
                except CaptureError:  # the forward does not run with this value, nor without graph
                    frozen[number] = None
                    continue
                difference = next(capture_differences(first, other, unset), None)
                if difference is None:
                    harmless.append(number)
                else:
                    frozen[number] = _frozen(number, after, difference, nodes)
        return harmless, frozen

    def _capture(
        self, values: Mapping[HostNumber, Any], stack_fill: int = 0
    ) -> tuple[Sequence[CanonicalNode], Sequence[Node]]:
        """Capture with some values, and return the nodes."""
        names, size = self._runner.memory_names(), self._size
        attribution = Attribution(stack_fill=stack_fill)
        with (
            self._numbers.varied(values),
            self._runner.recapture(batch_sizes=[size], attribution=attribution) as graphs,
        ):
            nodes = inspect_graph(graphs[size], names=names).nodes
            return canonical_nodes(graphs[size], names), nodes


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
