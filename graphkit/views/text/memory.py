"""A MemoryEstimate as text: a row per runner, and the other parts."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from graphkit.records import MemoryEstimate, count_of
from graphkit.views.formatting import facts_table, plain, size, text_table


def memory_view(estimate: MemoryEstimate) -> RenderableType:
    """Return the memory of the graphs by runner, and that of all parts."""
    table = text_table(["mode"], ["sizes", "measured", "pool", "executables"])
    for mode in estimate.graphs:
        measured = ", ".join(map(str, mode.measured_sizes)) or "stays eager"
        cells = f"{len(mode.batch_sizes)}", measured, size(mode.pool_bytes)
        table.add_row(plain(mode.mode), *cells, size(mode.executable_bytes))
    sizes = sum(len(mode.batch_sizes) for mode in estimate.graphs)
    parts = estimate.to_dict()
    title = f"{size(parts.pop('total'))} of memory with graphs of {count_of(sizes, 'size')}"
    facts = facts_table((part.replace("_", " "), size(n)) for part, n in parts.items())
    return Group(Text(title, style="bold"), table, Text(), facts)
