"""A record as text at any width."""

from __future__ import annotations

import dataclasses
import io
import re

import pytest
from rich.console import Console

from graphkit.errors import ConfigError
from graphkit.records import Argument, Node
from graphkit.views import inspect_view
from graphkit.views.pages.initial import PAGES_BY
from graphkit.views.pages.node import node_page
from graphkit.views.text.page import page_view


def test_one_mode_reads_as_stored(capture, text, golden):
    golden("capture.txt", text(inspect_view(capture, mode="TARGET_VERIFY")))


def test_a_graph_that_was_not_measured_reads_as_stored(capture, text, golden):
    golden("unmeasured.txt", text(inspect_view(capture, mode="draft", batch_size=8)))


def test_a_recording_reads_as_stored(recording, text, golden):
    golden("recording.txt", text(inspect_view(recording)))


def test_a_compiled_program_reads_as_stored(compiled, text, golden):
    golden("compiled.txt", text(inspect_view(compiled)))


def test_a_node_reads_as_stored(graph, text, golden):
    golden("node.txt", text(page_view(node_page(graph, 3))))


def test_a_graph_is_shown_alone(graph, text):
    shown = text(inspect_view(graph))
    assert shown.startswith("TARGET_VERIFY 8\n")
    assert "NVIDIA H200" in shown
    assert "p50 108.00 us" in shown


@pytest.mark.parametrize("width", [36, 50, 80, 200])
def test_no_line_is_wider_than_the_terminal(capture, text, width):
    assert max(map(len, text(inspect_view(capture), width).splitlines())) <= width


@pytest.mark.parametrize("width", [60, 80, 200])
def test_every_node_is_on_a_line_with_the_number_of_its_nodes(capture, text, width):
    shown = text(inspect_view(capture), width)
    names = "norm|gemm_kernel|flash_fwd|silu|refresh|publish|memset of 64 bytes|child graph"
    lines = re.findall(rf"^ *(?:{names})( x2)?(?:  |$)", shown, re.MULTILINE)
    assert sum(2 if twice else 1 for twice in lines) == 4 * 20
    assert shown.count("argmax (in #18)") == 4


def test_a_narrow_terminal_gets_fewer_columns_and_clips_no_text(graph, text):
    narrow, wide = (text(inspect_view(graph), width) for width in (30, 200))
    for text_of_first_column in ("gemm_kernel", "argmax (in #18)", "layers"):
        assert narrow.count(text_of_first_column) == wide.count(text_of_first_column) > 0
    assert "128x1x1" in wide
    assert "128x1x1" not in narrow
    assert "…" not in narrow + wide


def test_equal_nodes_in_a_row_share_a_line_and_others_do_not(make_graph, text):
    def places(_):
        for facts in ({}, {}, {"grid": (9, 1, 1)}, {"grid": (9, 1, 1), "block": (64, 1, 1)}, {}):
            node = {"kind": "kernel", "name": "k()", "short_name": "gemm", "module": "m"}
            yield {"grid": (8, 1, 1), "block": (128, 1, 1), "duration_us": 1.5, **node, **facts}

    shown = text(inspect_view(make_graph("DRAFT", 1, places=places)), 120)
    assert [line.split() for line in shown.splitlines() if "gemm" in line] == [
        ["gemm", "x2", "2", "3.00", "40.0%", "███▎", "kernel", "8x1x1", "128x1x1"],
        ["gemm", "1", "1.50", "20.0%", "█▋", "kernel", "9x1x1", "128x1x1"],
        ["gemm", "1", "1.50", "20.0%", "█▋", "kernel", "9x1x1", "64x1x1"],
        ["gemm", "1", "1.50", "20.0%", "█▋", "kernel", "8x1x1", "128x1x1"],
    ]


@pytest.mark.parametrize("time", [0.0, float("inf"), float("nan"), -1.0])
def test_an_invalid_duration_is_shown_without_a_bar(graph, text, time):
    nodes = tuple(dataclasses.replace(node, duration_us=time) for node in graph.nodes[:2])
    shown = text(inspect_view(dataclasses.replace(graph, nodes=nodes, edges=())))
    assert f"{time:.2f}" in shown


def test_a_long_name_folds(graph, text):
    name = "".join(f"part{number:02}" for number in range(20))
    node = dataclasses.replace(graph.nodes[0], short_name=name, module="a.b.c")
    shown = text(inspect_view(dataclasses.replace(graph, nodes=(node,), edges=())), 60)
    table = shown[shown.index("module and node") :].partition("\n\n")[0]
    lines = table.splitlines()[2:]
    assert "".join(line.split()[0] for line in lines) == name
    assert len(lines) > 2
    assert all(line.startswith("  ") for line in lines)


def test_an_ascii_terminal_gets_bars_of_hash_signs(graph):
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    Console(file=file, width=80, _environ={}).print(inspect_view(graph))
    file.flush()
    assert "###" in file.buffer.getvalue().decode("ascii")


def test_modes_and_sizes_that_were_not_chosen_are_left_out(capture, text):
    shown = text(inspect_view(capture, mode="DRAFT", batch_size=4), 200)
    rows = [line.split()[:2] for line in shown.splitlines() if line.startswith("  size ")]
    assert rows == [["size", "4"]]
    assert "TARGET_VERIFY 4" not in shown
    assert "bound: another graph writes it, TARGET_VERIFY" in shown
    by_size = text(inspect_view(capture, batch_size=8))
    assert "TARGET_VERIFY 8\n" in by_size
    assert "DRAFT 8\n" in by_size
    assert "DRAFT 4\n" not in by_size


def test_a_capture_without_nodes_says_so(capture, text):
    shown = text(inspect_view(dataclasses.replace(capture, graphs=())))
    assert "The record holds no nodes: the capture was not inspected." in shown
    assert "101.50" in shown


def test_a_mode_that_stays_eager_says_why(capture, text):
    eager = dataclasses.replace(capture.modes[1], sizes=(), eager_reason="it reads the host.")
    shown = text(inspect_view(dataclasses.replace(capture, modes=(eager,), graphs=())))
    assert "DRAFT stays eager: it reads the host." in shown


@pytest.mark.parametrize(
    ("wanted", "field", "there"),
    [
        ({"mode": "DECODE"}, "mode", "TARGET_VERIFY, DRAFT"),
        ({"mode": "DRAFT", "batch_size": 16}, "batch_size", "4, 8"),
        ({"batch_size": 5}, "batch_size", "4, 8"),
    ],
)
def test_an_unknown_mode_or_size_is_refused_with_the_known_ones(capture, wanted, field, there):
    with pytest.raises(ConfigError) as caught:
        inspect_view(capture, **wanted)
    assert caught.value.field == field
    assert f": {there}. Choose" in str(caught.value)


def test_graphs_with_equal_names_are_numbered(recording, text):
    assert text(inspect_view(recording, mode="runner.py:40 #2")).count("module and node") == 1
    with pytest.raises(ConfigError, match=r"runner\.py:40, runner\.py:40 #2\. Choose"):
        inspect_view(recording, mode="runner.py:41")


def test_text_of_a_record_is_no_markup_and_no_command_to_the_terminal(graph, text):
    odd = "a[bold]b[/bold]\x1b[31m\x9bc\nd"
    nodes = (dataclasses.replace(graph.nodes[0], short_name=odd, name=odd, module=odd),)
    shown = text(inspect_view(dataclasses.replace(graph, nodes=nodes, edges=(), name=odd)), 200)
    assert r"a[bold]b[/bold]\x1b[31m\x9bc d" in shown
    assert not set(shown) & {"\x1b", "\x9b"}


def test_a_node_shows_all_of_its_arguments(graph, text):
    arguments = tuple(Argument(size=4, kind="number", text=f"value {i}") for i in range(40))
    node = Node(index=0, kind="kernel", name="k", short_name="k", arguments=arguments)
    graph = dataclasses.replace(graph, nodes=(node,), edges=())
    shown = text(page_view(node_page(graph, 0)))
    assert all(f"value {i} " in shown for i in range(40))


@pytest.mark.parametrize("by", PAGES_BY)
def test_without_pictures_every_other_column_and_row_is_kept(capture, text, by):
    drawn = text(inspect_view(capture, by=by), 200)
    plain = text(inspect_view(capture, by=by, has_pictures=False), 200)
    blocks = set("█▉▊▋▌▍▎▏▁▂▃▄▅▆▇░▓")
    assert blocks & set(drawn)
    assert not blocks & set(plain)
    assert _words(plain) == [word for word in _words(drawn) if not set(word) <= blocks]


def _words(text):
    """The words of a text without the headings of pictures."""
    return [word for word in text.split() if word not in ("bar", "uses", "time")]
