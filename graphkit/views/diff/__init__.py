"""Compare two graphs, or records with graphs, node by node. Needs no torch."""

from graphkit.views.diff.graphs import diff_graphs
from graphkit.views.diff.records import (
    COSTS,
    TIMES,
    diff_records,
    have_common_figures,
    regressions,
    relative_change,
    with_changes_above,
)
from graphkit.views.diff.sentences import NOTHING_CHANGED

__all__ = [
    "COSTS",
    "NOTHING_CHANGED",
    "TIMES",
    "diff_graphs",
    "diff_records",
    "have_common_figures",
    "regressions",
    "relative_change",
    "with_changes_above",
]
