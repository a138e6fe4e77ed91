"""Host numbers that have changed since a runner's capture, and that its graphs keep."""

from __future__ import annotations

from typing import Any
from weakref import proxy

from graphkit.audit.host_objects.host_numbers import HostNumber, HostNumbers
from graphkit.errors import ReplayError
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
            # Loads when a number has changed, which is rare.
            from graphkit.audit.host_objects.number_captures import NumberCaptures

            texts = {number: number.now_text for number in new}
            harmless, frozen = NumberCaptures(self._runner, self.numbers, size).compare(
                changed, new
            )
            self._harmless |= {(size, number) for number in harmless}
            for number, value in frozen.items():
                self._found[size, number, texts[number]] = value
        values = (self._found.get((size, number, number.now_text)) for number in changed)
        return [value for value in values if value is not None]
