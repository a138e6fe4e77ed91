"""A diff as text."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from graphkit.records import load_record
from graphkit.views import diff_view
from graphkit.views.diff import diff_records

DATA = Path(__file__).parents[2] / "data"


@pytest.fixture
def later(capture, make_graph):
    """The capture after an update: split-K, another attention kernel, a size less."""

    def places(size):
        graph = capture.graphs[1]
        for node in graph.nodes:
            facts = {"duration_us": None, "start_us": None}
            facts = dataclasses.asdict(dataclasses.replace(node, **facts)) | {
                "arguments": node.arguments
            }
            del facts["index"]
            if node.short_name == "flash_fwd":
                facts |= {"short_name": "flash_v3", "name": "flash_v3()"}
            if node.parent is not None:
                facts["parent"] += 1
            yield facts
            if node.module == "layers.1.attn.out":
                yield facts | {"short_name": "splitKreduce_kernel", "name": "splitKreduce_kernel()"}

    draft = dataclasses.replace(capture.modes[1], sizes=capture.modes[1].sizes[:1])
    return dataclasses.replace(
        capture,
        environment=dataclasses.replace(capture.environment, driver="590"),
        modes=(capture.modes[0], draft),
        graphs=(
            capture.graphs[0],
            make_graph("TARGET_VERIFY", 8, places=places),
            capture.graphs[2],
        ),
    )


def test_an_update_reads_as_stored(capture, later, text, golden):
    golden("diff.txt", text(diff_view(diff_records(capture, later))))


def test_two_sizes_read_as_stored(capture, text, golden):
    golden("diff_sizes.txt", text(diff_view(diff_records(*capture.graphs[:2]))))


def test_nothing_changed(capture, text):
    shown = text(diff_view(diff_records(capture, capture)), 200)
    assert "nothing changed inside of TARGET_VERIFY 4, TARGET_VERIFY 8, DRAFT 4, DRAFT 8" in shown
    assert "change " not in shown


def test_a_figure_that_was_not_measured_before_has_no_change(capture, text):
    sizes = [dataclasses.replace(s, eager_us=50.0, pool_bytes=0) for s in capture.modes[0].sizes]
    mode = dataclasses.replace(capture.modes[0], sizes=tuple(sizes))
    after = dataclasses.replace(capture, modes=(mode, capture.modes[1]))
    assert row(text(diff_view(diff_records(capture, after))), "eager us") == ["-", "50"]
    back = text(diff_view(diff_records(after, capture)))
    assert row(back, "eager us") == ["50", "-"]
    assert row(back, "pool bytes") == ["0", "bytes", "8.0", "KiB"]


def row(shown, figure):
    """The cells after the first figure of that name."""
    return next(line for line in shown.splitlines() if figure in line).partition(figure)[2].split()


def test_a_long_list_of_nodes_ends_with_their_number(capture, text):
    empty = dataclasses.replace(capture.graphs[1], nodes=(), edges=())
    shown = text(diff_view(diff_records(empty, capture.graphs[1])), 200)
    assert "  added: 21\n" in shown
    assert "#20" not in shown, "--json lists them"


def test_sentences_of_several_graphs_are_shown_once(capture, text):
    def slower(graph):
        nodes = tuple(
            dataclasses.replace(node, grid=(9, 9, 9)) if node.grid == (8, 1, 1) else node
            for node in graph.nodes
        )
        return dataclasses.replace(graph, nodes=nodes)

    after = dataclasses.replace(capture, graphs=tuple(map(slower, capture.graphs)))
    shown = text(diff_view(diff_records(capture, after)), 200)
    assert "\nTARGET_VERIFY 4, DRAFT 4\n  grid 8x1x1 -> 9x9x9 in 2 nodes of gemm_kernel" in shown
    assert shown.count("  grid 8x1x1 -> 9x9x9 in 2 nodes") == 1


def test_a_moved_module_is_said_once(capture, text):
    def renamed(graph):
        nodes = tuple(
            dataclasses.replace(node, module=node.module.replace("layers", "model.layers"))
            for node in graph.nodes
        )
        return dataclasses.replace(graph, nodes=nodes)

    after = dataclasses.replace(capture, graphs=tuple(map(renamed, capture.graphs)))
    shown = text(diff_view(diff_records(capture, after)), 200)
    assert shown.count("module layers -> model.layers in 16 nodes") == 1


def test_arguments_are_below_what_matters(text):
    records = [load_record(DATA / f"h200-{name}.json") for name in ("capture", "tree")]
    shown = text(diff_view(diff_records(*records)), 200)
    last_kernel = shown.rindex("replaced by")
    assert shown.index("arguments of all 2 graphs") > last_kernel
    assert not re.search(r"^  argument", shown[:last_kernel], re.MULTILINE)
    assert "registers 64 -> 255 in 4 nodes of paged_attention_kernel" in shown
    assert "[cos]: -80 -> 48" not in shown
