"""Compare two graphs, or two records with graphs, node by node. Needs no torch."""

from graphkit.diff.graphs import diff_graphs
from graphkit.diff.records import diff_records

__all__ = ["diff_graphs", "diff_records"]
