"""Host numbers that have changed since a runner's capture, and that its graphs keep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any
from weakref import proxy

from graphkit.audit.host_objects.host_numbers import HostNumber, HostNumbers, value_text
from graphkit.errors import CaptureError, ReplayError
from graphkit.runners.host_objects import FrozenValue

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
        frozen = self.find(size)
        if frozen:
            node = frozen[0].node
            origin = ", ".join(filter(None, (node.module, node.source))) if node else ""
            made_by = f" The node is made by {origin}." if origin else ""
            raise ReplayError(f"size {size}: {frozen[0].text}{made_by} {_ADVICE}")

    def find(self, size: int) -> list[FrozenValue]:
        """Return the numbers that have changed and that the graph of a size keeps.

        If a number has changed, waits for the device and captures the size again; outputs in the
        runner's pool become invalid.
        """
        changed = [n for n in self.numbers.changed() if (size, n) not in self._harmless]
        new = [n for n in changed if (size, n, n.now_text) not in self._found]
        if new:
            self._compare(size, changed, new)
        values = (self._found.get((size, number, number.now_text)) for number in changed)
        return [value for value in values if value is not None]

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
                )
