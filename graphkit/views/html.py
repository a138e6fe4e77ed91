"""A record with graphs as one HTML file that loads nothing."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from graphkit.records import RecordWithGraphs, extent, title_of
from graphkit.views.environment import environment_facts
from graphkit.views.formatting import plain, us
from graphkit.views.module_tree import nodes_in_modules
from graphkit.views.pages.kernels import kernels_page
from graphkit.views.selection import NamedGraph, with_only

_PLACEHOLDER = re.compile(r"\{\{(\w+)\}\}")
_HEADS = ("graph", "#", "module", "node", "us", "grid", "block", "op")
_SUMS = ("nodes", "us", "share", "mean us")


def html_of(record: RecordWithGraphs, graphs: Sequence[NamedGraph]) -> str:
    """Return HTML with a tree of modules, tables of kernels and nodes, and details of each node.

    It embeds the record, with these graphs alone, as the JSON text of ``to_json``. It opens with
    the first graph that has nodes; without JavaScript it is a table of all nodes.
    """
    embedded = with_only(record, graphs).to_json()
    where = ", ".join(" ".join(fact) for fact in environment_facts(record))
    texts = {
        "title": escape(plain(f"graphkit {record.KIND}: {title_of(record)}")),
        "where": escape(plain(where)),
        "first": str(next((at for at, (_, graph) in enumerate(graphs) if graph.nodes), 0)),
        "record": _in_script(embedded),
        "kernels": _in_script(json.dumps([_kernels(graphs, at) for at in range(len(graphs))])),
        "table": "".join(_table(graphs)),
    }
    template = files(__package__).joinpath("inspect.html").read_text(encoding="utf-8")
    return _PLACEHOLDER.sub(lambda found: texts[found[1]], template)


def _in_script(text: str) -> str:
    """Return JSON in which no tag can end the script."""
    return text.replace("<", "\\u003c")


def _kernels(graphs: Sequence[NamedGraph], index: int) -> list[dict[str, Any]]:
    """Return the kernels of a graph as their page has them, the most expensive first."""
    page = kernels_page(graphs, index)
    names = [column.name for column in page.columns]
    found = []
    for row in page.rows:
        values = dict(zip(names, row.values, strict=True))
        found.append(
            {
                "key": row.key,
                "name": row.values[0],
                "note": row.note,
                **{name: _finite(values[name]) for name in _SUMS},
                "modules": [module.values[0] for module in row.children],
            }
        )
    return found


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else value


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
