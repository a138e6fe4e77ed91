"""One capture of a recorded program, until its graph is written down."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from graphkit.recording.parts import PartWriter

if TYPE_CHECKING:
    from graphkit.graphs.attribution import Attribution
    from graphkit.records import GraphRecord


class Following:
    """Notes what makes the nodes of a graph, and writes the graph down; see ``hooks.Follower``.

    What needs torch is imported when the program first captures: the hooks are made while torch
    itself is still being imported.

    Args:
        writer: Writes for this process.
    """

    def __init__(self, writer: PartWriter) -> None:
        self._writer = writer
        self._attribution: Attribution | None = None
        self._place = ""

    def beginning(self) -> None:
        """Note who captures."""
        from graphkit.graphs.attribution import Attribution
        from graphkit.graphs.places import caller_line

        self._attribution = Attribution()
        self._place = caller_line()

    def begun(self) -> None:
        """Note what makes nodes, from now on."""
        if self._attribution is not None:
            self._attribution.__enter__()

    def ending(self) -> None:
        """Note no more."""
        if self._attribution is not None:
            self._attribution.__exit__()

    def ended(self, graph: Any) -> None:
        """Write the graph down. It is not replayed: that is the program's."""
        self._writer.add(lambda: self._record_of(graph))

    def _record_of(self, graph: Any) -> GraphRecord:
        from graphkit.graphs.walk import inspect_graph

        return inspect_graph(
            graph, attribution=self._attribution, name=self._place, captured_at=self._place
        )
