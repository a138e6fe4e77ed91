"""Compare two graphs, or records with graphs, node by node. Needs no torch."""

from graphkit.views.diff.graphs import diff_graphs
from graphkit.views.diff.records import diff_records

__all__ = ["diff_graphs", "diff_records"]
