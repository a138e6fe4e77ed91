"""Observers of one capture: they attribute its nodes, and use the finished graph.

Imports of torch wait until the program captures, because the hooks are installed while torch is
still being imported.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from graphkit.audit.foreign.graph_files import GraphFileWriter

if TYPE_CHECKING:
    from graphkit.graphs.attribution import Attribution
    from graphkit.records import GraphRecord


class CaptureObserver(ABC):
    """Methods that are called at the steps of one capture, in this order.

    Attributes:
        attribution: Origins of the nodes; ``None`` if the beginning was not observed.
        captured_at: The line that captures; empty if the beginning was not observed.
        observe: Called for each operation, see ``Attribution``; ``None`` for nothing.
    """

    def __init__(self) -> None:
        self.attribution: Attribution | None = None
        self.captured_at = ""
        self.observe: Any = None

    def before_begin(self) -> None:
        """Note the line that captures, before the stream captures."""
        from graphkit.graphs.attribution import Attribution
        from graphkit.graphs.source_lines import caller_line

        self.attribution = Attribution(observe=self.observe)
        self.captured_at = caller_line()

    def after_begin(self) -> None:
        """Start to attribute nodes, as soon as the stream captures."""
        if self.attribution is not None:
            self.attribution.__enter__()

    def before_end(self) -> None:
        """Stop attributing nodes, while the stream still captures."""
        if self.attribution is not None:
            self.attribution.__exit__()

    @abstractmethod
    def after_end(self, graph: Any) -> None:
        """Use the graph, once it can be replayed."""


class RecordedCapture(CaptureObserver):
    """Writes the finished graph.

    Args:
        writer: The writer of this process.
    """

    def __init__(self, writer: GraphFileWriter) -> None:
        super().__init__()
        self._writer = writer

    def after_end(self, graph: Any) -> None:
        """Inspect and write the graph, without a replay: replays have effects in the program."""
        self._writer.write(lambda: self._inspect(graph))

    def _inspect(self, graph: Any) -> GraphRecord:
        from graphkit.graphs.walk import inspect_graph

        return inspect_graph(
            graph,
            attribution=self.attribution,
            name=self.captured_at,
            captured_at=self.captured_at,
        )
