"""A record with graphs as one HTML page that loads nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from html import escape
from importlib.resources import files

from graphkit.records import RecordWithGraphs, backend_of, title_of
from graphkit.views.figures import extent, plain, us
from graphkit.views.module_tree import placed
from graphkit.views.selection import Titled, narrowed

_PLACE = re.compile(r"\{\{(\w+)\}\}")
_HEADS = ("graph", "#", "module", "node", "us", "grid", "block", "op")


def page_of(record: RecordWithGraphs, graphs: Sequence[Titled]) -> str:
    """The page: tree of time, table of nodes, details of each; a plain table without JavaScript.

    It holds the record itself, with these graphs, as the JSON text that ``to_json`` gives, and
    opens with the first graph that has nodes, which a compiled program's first one has not.
    """
    held = narrowed(record, graphs).to_json()
    parts = {
        "title": escape(plain(f"graphkit {record.KIND}: {title_of(record)}")),
        "where": escape(plain(_where(record))),
        "first": str(next((at for at, (_, graph) in enumerate(graphs) if graph.nodes), 0)),
        "record": held.replace("<", "\\u003c"),  # no tag can end the script
        "table": "".join(_table(graphs)),
    }
    template = files(__package__).joinpath("inspect.html").read_text(encoding="utf-8")
    return _PLACE.sub(lambda place: parts[place[1]], template)


def _where(record: RecordWithGraphs) -> str:
    facts = record.environment
    versions = [
        f"{name} {getattr(facts, name)}"
        for name in ("torch", "triton", "cuda", "driver", "graphkit")
        if getattr(facts, name)
    ]
    return ", ".join([facts.device, f"{backend_of(record)} backend", *versions])


def _table(graphs: Sequence[Titled]) -> Iterator[str]:
    yield "<table><tr>"
    yield from (f'<th scope="col">{head}</th>' for head in _HEADS)
    yield "</tr>\n"
    for title, graph in graphs:
        for modules, node in placed(graph):
            cells = (
                title, str(node.index), ".".join(modules), node.short_name, us(node.duration_us),
                extent(node.grid), extent(node.block), node.op,
            )  # fmt: skip
            yield f"<tr>{''.join(f'<td>{escape(plain(cell))}</td>' for cell in cells)}</tr>\n"
    yield "</table>"
