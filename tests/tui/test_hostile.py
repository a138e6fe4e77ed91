"""Records of unknown origin: no text in them reaches the terminal as a command."""

from __future__ import annotations

import math
import unicodedata
from dataclasses import replace

import pytest

from graphkit.records import Edge

TEXTS = {
    "escape": "\x1b[31mred\x1b]0;title\x07",
    "markup": "[bold]kernel[/bold] [/] [link=x]",
    "lines": "one\ntwo\r\nthree\tfour",
    "wide": "日本語カーネル",
    "combining": "é🇩🇪👩\u200d💻",
    "surrogate": "\ud800kernel",
    "endless": "std::tuple<" * 400,
    "empty": "",
    "blank": "   ",
    "bidi": "\u202ekernel\u202c",
}
VIEWS = (
    ("b",),
    ("escape", "down", "enter", "+", "end"),
    ("enter",),
    ("escape", "c", "+"),
    ("escape", "m", "+"),
)
"""Keys that lead from one page to the next."""


def spoilt(record, text):
    """Return the record with ``text`` in place of every text."""
    words = dict.fromkeys(("name", "short_name", "op", "source", "scope"), text)
    nodes = tuple(
        replace(
            node, **words, module=text and f"{text}.{text}", attributes={text: text},
            arguments=tuple(replace(a, name=text, text=text) for a in node.arguments),
        )
        for node in record.graphs[0].nodes
    )  # fmt: skip
    graphs = tuple(
        replace(graph, name=text, captured_at=text, nodes=nodes) for graph in record.graphs[:2]
    )
    stats = replace(record.modes[0].stats, fallbacks={text: 1})
    buffers = tuple(replace(b, field=text, meaning=text) for b in record.modes[0].buffers[:1])
    modes = (replace(record.modes[0], eager_reason=text, stats=stats, buffers=buffers),)
    return replace(record, target=text, graphs=graphs, modes=modes)


@pytest.mark.slow
@pytest.mark.parametrize("name", TEXTS)
def test_any_text_is_shown_without_control_characters(capture, drive, name):
    async def script(on):
        shown = []
        for keys in VIEWS:
            await on.keys(*keys)
            shown += on.lines
        return shown

    for line in drive(spoilt(capture, TEXTS[name]), script, (70, 16)):
        assert not any(unicodedata.category(each) in ("Cc", "Cs") for each in line), repr(line)


TIMES = {
    "nan": (math.nan,), "inf": (math.inf,), "negative": (-1.0,), "zero": (0.0,),
    "cancelling": (1e300, -1e300, 1e200),
}  # fmt: skip
"""Durations of the first nodes whose sum has no valid shares."""


def test_an_invalid_duration_is_shown_without_a_bar(capture, drive):
    graph = capture.graphs[0]

    async def script(on):
        for first in TIMES.values():
            times = zip(graph.nodes, (*first, *[first[-1]] * 40), strict=False)
            nodes = (replace(node, duration_us=time, start_us=time) for node, time in times)
            await on.restart(replace(graph, nodes=tuple(nodes)))
            await on.press("+", "end", "enter", "escape", "s", "s", "s", "s", "S", "c")
            assert "there is no other graph" in on.text

    drive(graph, script)


def test_a_graph_of_an_unknown_process_is_shown(recording, drive):
    graphs = tuple(replace(recording.graphs[0], process=number) for number in (-1, -9, 9))

    async def script(on):
        return on.text

    text = drive(replace(recording, graphs=graphs), script)
    assert all(f"process #{number} " in text for number in (-1, -9, 9))


def test_every_page_of_a_damaged_record_opens(capture, drive):
    graph = capture.graphs[0]
    nodes = tuple(
        replace(node, index=index, parent=parent)
        for node, index, parent in zip(
            graph.nodes, (7, 7, 3, 99, 0), (99, 7, 3, -1, 0), strict=False
        )
    )
    edges = (Edge(source=7, target=7), Edge(source=500, target=3), Edge(source=3, target=-4))
    torn = replace(graph, nodes=nodes, edges=edges)
    record = replace(capture, graphs=(torn, replace(torn, batch_size=4)))

    async def script(on):
        await on.press("down", "enter", "+")
        rows = len(on.listing.lines)
        for _ in range(rows):
            await on.keys("enter", "end", "enter", *["escape"] * (on.depth - 1))
            await on.keys("down")
        await on.press("c", "+", "tab", "escape", "m", "+")
        return rows

    assert drive(record, script) >= 5
