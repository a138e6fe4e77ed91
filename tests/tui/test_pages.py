"""Contents of the pages of a record, without a terminal."""

from __future__ import annotations

from dataclasses import replace

import pytest

from graphkit.records import Argument, Edge, Mismatch, Node, Pointer
from graphkit.views.pages.initial import initial_pages
from graphkit.views.tui.listing import Listing


class Reader:
    """A page with everything open, as tables of text."""

    def __init__(self, page):
        self.page, self.listing = page, Listing(page)
        self.listing.open_all()
        self.rows = {}
        for line in self.listing.lines:
            self.rows[line.row.key] = line.row

    def cells(self, key):
        names = (column.name for column in self.page.columns)
        return dict(zip(names, self.listing.cells(self.rows[key]), strict=True))

    def follow(self, link, key=None):
        found = self.page.link(link, self.rows[key] if key else None)
        return Reader(found()) if callable(found) else found

    def sibling(self, step):
        there = self.page.siblings
        return Reader(there.make((there.index + step) % there.count))


@pytest.fixture
def overview(capture):
    return Reader(initial_pages(capture)[0])


@pytest.fixture
def graph(overview):
    return overview.follow("open", "TARGET_VERIFY 8")


def test_the_overview_has_a_row_for_each_size(overview):
    sizes = [key for key in overview.rows if key.split()[-1].isdigit()]
    assert sizes == [f"{m} {n}" for m in ("TARGET_VERIFY", "DRAFT_EXTEND_V2") for n in (1, 4, 8)]
    assert overview.cells("TARGET_VERIFY 8") == {
        "mode and size": "size 8", "nodes": "25", "pool": "2.0 MiB", "capture ms": "318.0",
        "replay us": "114.00", "eager us": "908.00", "difference": "0", "replays": "1,000",
        "padded rows": "", "fallbacks": "",
    }  # fmt: skip


def test_the_overview_counts_padding_and_fallbacks_by_mode_and_gives_the_reasons(overview):
    cells, note = overview.cells("TARGET_VERIFY"), overview.rows["TARGET_VERIFY"].note
    assert (cells["replays"], cells["padded rows"], cells["fallbacks"]) == ("1,204", "310", "5")
    assert "fell back 4 times: batch size 9 is above the largest captured size, 8" in note
    assert "fell back 1 time: seq_lens is on the host" in note
    assert overview.rows["TARGET_VERIFY 1"].note.endswith(note)
    assert overview.cells("DRAFT_EXTEND_V2")["fallbacks"] == ""
    assert overview.rows["DRAFT_EXTEND_V2"].note == "has no counts of replays"


def test_the_overview_names_eager_modes_and_wrong_replays(capture):
    eager = replace(capture.modes[0], sizes=(), eager_reason="the backend plans on the host")
    wrong = Mismatch(field="logits", row=0, request=0, expected=1.0, got=2.0)
    page = Reader(initial_pages(replace(capture, modes=(eager,), mismatches=(wrong,)))[0])
    assert page.rows["TARGET_VERIFY"].note.startswith("stays eager: the backend plans on the host")
    assert page.rows["TARGET_VERIFY"].tone == "warning"
    assert ("wrong replays", "1 row; graphkit capture lists them") in page.page.facts


def test_the_modules_of_a_graph_sum_their_nodes(graph):
    assert graph.cells("model.layers")["nodes"] == "20"
    assert graph.cells("model.layers.0.self_attn.o_proj")["nodes"] == "2"
    shares = [float(graph.cells(key)["share"][:-1]) for key in ("#0", "#1", "#2", "model", "#24")]
    assert sum(shares) == pytest.approx(100, abs=0.3)
    assert graph.cells("#5")["pdl"] == "1"
    assert graph.cells("model")["pdl"] == "12"
    assert graph.cells("#0")["pdl"] == ""
    assert graph.cells("model")["bar"] == "███████▎"


def test_a_kernel_row_shows_the_launch_and_its_note_the_full_name(graph):
    cells = graph.cells("#5")
    assert (cells["grid"], cells["block"], cells["shared"]) == ("16x8x1", "128x1x1", "192.0 KiB")
    assert graph.rows["#5"].note == (
        "#5 · model.layers.0.self_attn.q_proj · aten::mm · model.py:41 in forward · "
        "nvjet_sm90_tst_64x8_64x16_4x1_v_bz_TNT"
    )


def test_modules_with_a_single_child_share_a_row(capture):
    node = replace(capture.graphs[0].nodes[4], module="a.b.c", index=0)
    page = Reader(initial_pages(replace(capture.graphs[0], nodes=(node,), edges=()))[0])
    assert list(page.rows) == ["a.b.c", "#0"]
    assert page.cells("a.b.c")["module and node"] == "a.b.c"


def test_an_unmeasured_graph_has_no_columns_of_time(capture):
    nodes = tuple(
        replace(node, duration_us=None, grid=(), kind="op") for node in capture.graphs[0].nodes
    )
    bare = replace(capture.graphs[0], nodes=nodes, backend="recorder", timing=None, memory=None)
    page = Reader(initial_pages(bare)[0])
    assert [column.name for column in page.page.columns] == [
        "module and node", "nodes", "part", "kind", "source",
    ]  # fmt: skip
    assert page.page.facts[:2] == (("nodes", "23"), ("times", "not measured"))
    assert page.follow("memory") == "the record has no memory map of this graph"
    assert page.follow("buffers") == "the record has no input buffers of this graph"
    assert page.follow("compare") == "there is no other graph to compare it with"


def test_a_graph_opens_with_as_many_rows_as_a_small_terminal_shows(graph, large):
    assert 10 < len(Listing(graph.page).lines) <= 16
    assert len(Listing(initial_pages(large)[0]).lines) <= 16


def test_a_node_shows_its_arguments_by_name(graph):
    node = graph.follow("open", "#5")
    assert node.cells("grid")["value"] == "16x8x1"
    assert node.cells("argument 0") == {
        "fact": "0", "kind": "weight", "offset": "0", "bytes": "8",
        "value": "model.layers.0.self_attn.q_proj.weight at 0x7f0000050000",
    }  # fmt: skip
    assert node.cells("argument 2") == {
        "fact": "2", "value": "32", "kind": "number", "offset": "16", "bytes": "4",
    }  # fmt: skip
    named = graph.follow("open", "#0")
    assert named.cells("argument 0")["fact"] == "table"


def test_a_struct_shows_the_pointers_in_it(capture):
    pointers = (
        Pointer(address=16, memory="weight", name="w", offset=8),
        Pointer(address=32, memory="freed", name="", offset=24),
    )
    struct = Argument(size=40, kind="struct", text="0x10, 0x20", pointers=pointers)
    node = Node(index=0, kind="kernel", name="k", short_name="k", arguments=(struct,))
    page = Reader(initial_pages(replace(capture.graphs[0], nodes=(node,), edges=()))[0])
    node = page.follow("open", "#0")
    assert node.cells("argument 0")["value"] == "0x10, 0x20"
    assert node.cells("argument 0.0") == {
        "fact": "+8", "value": "w at 0x10", "kind": "weight", "offset": "", "bytes": "",
    }  # fmt: skip
    assert node.cells("argument 0.1")["kind"] == "freed"
    assert node.rows["argument 0.1"].tone == "bad"


def test_a_node_lists_its_dependencies_and_their_kind(graph):
    node = graph.follow("open", "#5")
    assert node.cells("waits for 4")["value"] == (
        "_rms_norm, programmatic (PDL): the later node starts before the earlier one ends"
    )
    assert node.follow("open", "waited for by 6").page.title.startswith("#6 ")
    assert node.sibling(1).page.title.startswith("#6 ")
    assert node.sibling(-1).page.title.startswith("#4 ")


def test_child_graphs_and_their_nodes_link_to_each_other(capture):
    holder = Node(index=0, kind="child graph", name="child", short_name="child")
    inner = Node(index=1, kind="kernel", name="k", short_name="k", parent=0)
    lost = Edge(source=7, target=1)
    page = Reader(
        initial_pages(replace(capture.graphs[0], nodes=(holder, inner), edges=(lost,)))[0]
    )
    assert page.follow("open", "#0").follow("open", "holds 1").page.title == "#1 k"
    assert page.follow("open", "#1").follow("open", "is in 0").page.title == "#0 child"
    assert page.follow("open", "#1").cells("waits for 7")["value"] == "not in the record"


def test_buffers_name_the_modes_that_share_them(overview):
    page = overview.follow("buffers", "TARGET_VERIFY 4")
    assert page.cells("seq_lens") == {
        "field": "seq_lens", "dtype": "int32", "shape": "8", "axis": "request", "pad": "1",
        "address": "0x7f1000002000", "size": "64 bytes", "shared by": "DRAFT_EXTEND_V2",
    }  # fmt: skip
    assert page.cells("input_ids")["shared by"] == ""
    other = page.sibling(1)
    assert other.page.title == "buffers of DRAFT_EXTEND_V2"
    assert (
        other.cells("hidden_states")["shared by"] == "bound: another graph writes it, TARGET_VERIFY"
    )


def test_a_partly_shared_buffer_names_the_field(capture):
    first, second = capture.modes
    moved = replace(second.buffers[0], address=first.buffers[0].address + 8, field="packed")
    modes = (first, replace(second, buffers=(moved,)))
    page = Reader(initial_pages(replace(capture, modes=modes))[0]).follow(
        "buffers", "TARGET_VERIFY"
    )
    assert page.cells("input_ids")["shared by"] == "DRAFT_EXTEND_V2.packed"


def test_a_comparison_lists_sentences_figures_and_nodes(graph):
    page = graph.follow("compare")
    assert page.page.title == "from TARGET_VERIFY 4 to TARGET_VERIFY 8"
    assert any(key.startswith("split-K appeared") for key in page.rows)
    assert page.cells("added 10") == {
        "change": "cublasLt::splitKreduce_kernel", "before": "", "after": "#10",
        "module": "model.layers.0.self_attn.o_proj",
    }  # fmt: skip
    assert page.cells("p50_us") == {
        "change": "profiled p50 us", "before": "116.90", "after": "129.90 (+11.1%)", "module": "",
    }  # fmt: skip
    assert page.cells("graph_bytes")["after"] == "2.0 MiB (+100.0%)"
    assert page.cells("changed 5 grid") == {
        "change": "grid", "before": "16x4x1", "after": "16x8x1", "module": "",
    }  # fmt: skip
    assert page.follow("open", "changed 5").page.title.startswith("#5 nvjet")
    assert page.follow("open", "added 10").page.title == "#10 cublasLt::splitKreduce_kernel"


def test_a_removed_node_links_to_the_graph_before(overview):
    page = overview.follow("compare", "TARGET_VERIFY 1").sibling(1)
    assert page.page.title == "from TARGET_VERIFY 8 to TARGET_VERIFY 1"
    assert page.cells("removed 10")["before"] == "#10"
    assert page.follow("open", "removed 10").page.title == "#10 cublasLt::splitKreduce_kernel"


def test_a_comparison_has_all_other_sizes_as_siblings(overview):
    page = overview.follow("compare", "TARGET_VERIFY 4")
    titles = [page.page.title, page.sibling(1).page.title]
    assert titles == [f"from TARGET_VERIFY {size} to TARGET_VERIFY 4" for size in (1, 8)]
    assert page.page.siblings.count == 2


def test_memory_lists_what_the_nodes_point_at(graph):
    page = graph.follow("memory")
    assert page.cells("0x7f1000000000") == {
        "address and name": "0x7f1000000000", "nodes": "4", "used": "64.0 KiB", "size": "2.0 MiB",
        "memory": "default pool", "used by": "#0 to #18",
    }  # fmt: skip
    seq_lens = page.rows["0x7f1000002000 input seq_lens"]
    assert seq_lens.note == ("seq_lens, argument of #0, #2; at most 8.0 KiB, then the next address")
    assert page.page.cells(seq_lens)[2] == "#0 to #2"


def test_memory_outside_of_all_segments_and_freed_memory_are_shown(capture):
    pointer = Pointer(address=64, memory="freed", name="")
    argument = Argument(size=8, kind="pointer", text="0x40", pointers=(pointer,))
    node = Node(index=0, kind="kernel", name="k", short_name="k", arguments=(argument,))
    page = Reader(initial_pages(replace(capture.graphs[0], nodes=(node,), edges=()))[0])
    memory = page.follow("memory")
    assert memory.cells("elsewhere")["nodes"] == "1"
    assert memory.cells("0x40 freed ")["memory"] == "freed"
    assert memory.rows["0x40 freed "].tone == "bad"


def test_a_recording_is_grouped_by_process_and_line(recording):
    page = Reader(initial_pages(recording)[0])
    assert page.page.title == "python serve.py"
    assert page.cells("process 0 serve.py:88 in warm_up")["graphs"] == "2"
    assert page.cells("process 0")["process, line and graph"] == "process 4101: python serve.py"
    assert page.cells("process 0")["nodes"] == str(23 + 23 + 25)
    graph = page.follow("open", "serve.py:88 #1")
    assert ("captured at", "serve.py:88 in warm_up") in graph.page.facts
    assert graph.page.siblings.count == 3, "the graphs of the same process"
    assert page.follow("compare", "worker.py:3 #0") == "there is no other graph to compare it with"


def test_a_recording_without_graphs_or_processes_says_so(recording):
    page = initial_pages(replace(recording, graphs=(), processes=()))[0]
    assert (page.rows, page.empty) == ((), "the program captured no graph")
    lost = Reader(initial_pages(replace(recording, processes=()))[0])
    assert lost.cells("process 1")["process, line and graph"] == "process #1"


def test_every_page_of_a_real_record_opens(h200):
    overview = Reader(initial_pages(h200)[0])
    sizes = [key for key, row in overview.rows.items() if "open" in row.links]
    assert len(sizes) == len(h200.graphs) == 4
    for size in sizes:
        graph = overview.follow("open", size)
        nodes = [key for key, row in graph.rows.items() if "open" in row.links]
        pages = [graph.follow("open", key) for key in nodes]
        assert len(pages) == int(overview.cells(size)["nodes"])
        modules = [page.cells("module")["value"] for page in pages if "module" in page.rows]
        assert any(module.endswith("q_proj") for module in modules)
        assert graph.follow("memory").rows
        assert graph.follow("compare").rows
        assert graph.follow("buffers").rows


def test_a_real_matrix_product_names_its_weight(h200):
    graph = Reader(initial_pages(h200, mode="TARGET_VERIFY", batch_size=64)[-1])
    (name,) = (key for key in graph.rows if key.endswith("layers.0.self_attn.q_proj"))
    node = graph.follow("open", graph.rows[name].children[0].key)
    named = [row.values[1] for row in node.rows.values() if row.values[2] == "weight"]
    assert any(text.startswith(f"{name}.weight at 0x") for text in named)


def test_equal_nodes_in_a_row_are_a_run_that_opens_to_each_node(capture):
    first = capture.graphs[0].nodes[0]
    nodes = tuple(replace(first, index=index, duration_us=2.0) for index in range(3))
    other = replace(first, index=3, grid=(9, 1, 1))
    page = Reader(initial_pages(replace(capture.graphs[0], nodes=(*nodes, other), edges=()))[0])
    assert list(page.rows) == ["#0 x3", "#0", "#1", "#2", "#3"]
    cells = page.cells("#0 x3")
    assert (cells["module and node"], cells["nodes"], cells["us"]) == ("_refresh x3", "3", "6.00")
    assert page.follow("open", "#1").page.title == "#1 _refresh"
    assert page.page.opened == frozenset()
