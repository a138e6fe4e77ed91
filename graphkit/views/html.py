"""A record with graphs as one HTML file that loads nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from html import escape
from importlib.resources import files

from graphkit.records import RecordWithGraphs, extent, title_of
from graphkit.views.environment import environment_facts
from graphkit.views.formatting import plain, us
from graphkit.views.module_tree import nodes_in_modules
from graphkit.views.selection import NamedGraph, with_only

_PLACEHOLDER = re.compile(r"\{\{(\w+)\}\}")
_HEADS = ("graph", "#", "module", "node", "us", "grid", "block", "op")


def html_of(record: RecordWithGraphs, graphs: Sequence[NamedGraph]) -> str:
    """Return HTML with a tree of modules by time, a table of nodes, and details of each node.

    It embeds the record, with these graphs alone, as the JSON text of ``to_json``. It opens with
    the first graph that has nodes; without JavaScript it is a table of all nodes.
    """
    embedded = with_only(record, graphs).to_json()
    where = ", ".join(" ".join(fact) for fact in environment_facts(record))
    texts = {
        "title": escape(plain(f"graphkit {record.KIND}: {title_of(record)}")),
        "where": escape(plain(where)),
        "first": str(next((at for at, (_, graph) in enumerate(graphs) if graph.nodes), 0)),
        "record": embedded.replace("<", "\\u003c"),  # no tag can end the script
        "table": "".join(_table(graphs)),
    }
    template = files(__package__).joinpath("inspect.html").read_text(encoding="utf-8")
    return _PLACEHOLDER.sub(lambda found: texts[found[1]], template)


def _table(graphs: Sequence[NamedGraph]) -> Iterator[str]:
    yield "<table><tr>"
    yield from (f'<th scope="col">{head}</th>' for head in _HEADS)
    yield "</tr>\n"
    for title, graph in graphs:
        for modules, node in nodes_in_modules(graph):
            cells = (
                title, str(node.index), ".".join(modules), node.short_name, us(node.duration_us),
                extent(node.grid), extent(node.block), node.op,
            )  # fmt: skip
            yield f"<tr>{''.join(f'<td>{escape(plain(cell))}</td>' for cell in cells)}</tr>\n"
    yield "</table>"
