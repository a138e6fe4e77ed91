"""What changed between two graphs, and between two records."""

from graphkit.records.diff.graphs import Figure, GraphDiff, diff_graphs
from graphkit.records.diff.nodes import Change, NodeChange
from graphkit.records.diff.record import DiffRecord, SizeDiff, diff_records

__all__ = [
    "Change",
    "DiffRecord",
    "Figure",
    "GraphDiff",
    "NodeChange",
    "SizeDiff",
    "diff_graphs",
    "diff_records",
]
