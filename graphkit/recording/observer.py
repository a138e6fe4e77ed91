"""Observes one capture of a recorded program and writes its graph."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from graphkit.recording.graph_files import GraphFileWriter

if TYPE_CHECKING:
    from graphkit.graphs.attribution import Attribution
    from graphkit.records import GraphRecord


class CaptureObserver:
    """Attributes the nodes of one capture and writes the finished graph.

    Implements ``hooks.Observer``. Imports of torch wait until the program captures, because the
    hooks are installed while torch is still being imported.

    Args:
        writer: The writer of this process.
    """

    def __init__(self, writer: GraphFileWriter) -> None:
        self._writer = writer
        self._attribution: Attribution | None = None
        self._captured_at = ""

    def before_begin(self) -> None:
        """Note the line that captures."""
        from graphkit.graphs.attribution import Attribution
        from graphkit.graphs.source_lines import caller_line

        self._attribution = Attribution()
        self._captured_at = caller_line()

    def after_begin(self) -> None:
        """Start to attribute nodes."""
        if self._attribution is not None:
            self._attribution.__enter__()

    def before_end(self) -> None:
        """Stop attributing nodes."""
        if self._attribution is not None:
            self._attribution.__exit__()

    def after_end(self, graph: Any) -> None:
        """Inspect and write the graph, without a replay: replays have effects in the program."""
        self._writer.write(lambda: self._inspect(graph))

    def _inspect(self, graph: Any) -> GraphRecord:
        from graphkit.graphs.walk import inspect_graph

        return inspect_graph(
            graph,
            attribution=self._attribution,
            name=self._captured_at,
            captured_at=self._captured_at,
        )
