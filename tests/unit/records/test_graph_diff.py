"""Alignment of the nodes of two graphs, and their changes as records and as sentences."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given, settings, strategies as st

from graphkit.records import Argument, Edge, GraphMemory, Pointer, Timing
from graphkit.views.diff import diff_graphs
from graphkit.views.diff.nodes import align

LAYER = ("{}.norm aten::norm norm", "{}.mlp aten::mm gemm", "{}.mlp aten::gelu gelu")


def layers(count, *, without=(), with_reduce=()):
    rows = []
    for layer in range(count):
        rows += [row.format(f"layers.{layer}") for row in LAYER]
        if layer in with_reduce:
            rows.insert(-1, f"layers.{layer}.mlp aten::mm splitKreduce_kernel")
    return [row for index, row in enumerate(rows) if index not in without]


def pointer(memory, name, address):
    found = Pointer(address=address, memory=memory, name=name)
    return Argument(size=8, kind="pointer", text=name, pointers=(found,))


def with_argument(make_graph, *arguments):
    return make_graph({"short_name": "gemm", "module": "mlp", "arguments": arguments})


def fields(diff):
    return [(c.field, c.before, c.after) for node in diff.changed for c in node.changes]


RENAMED = [row.replace("aten::gelu gelu", "aten::gelu fused") for row in layers(12)]
MEMSET = {"kind": "memset", "short_name": "memset of 64 bytes", "grid": ()}
CHILD = {"kind": "child graph", "short_name": "child graph", "grid": ()}
SENTENCES = {
    "no change": (layers(3), layers(3), (0, 0, 0), ["nothing changed"]),
    "equal layers share a sentence": (
        layers(4), layers(4, with_reduce=[1, 3]), (2, 0, 0),
        ["split-K appeared in layers.*.mlp: 2 nodes more"],
    ),
    "equal layers that lack nodes": (
        layers(4, with_reduce=[1, 3]), layers(4), (0, 2, 0),
        ["split-K is gone from layers.*.mlp: 2 nodes less"],
    ),
    "the split of keys and values is no split-K": (
        ["a b x"], ["a b x", "a b flash_fwd_splitkv_kernel"], (1, 0, 0),
        ["kernel flash_fwd_splitkv_kernel appeared in a: 1 node more"],
    ),
    "a kernel replaced everywhere": (
        layers(12), RENAMED, (0, 0, 12),
        ["kernel gelu replaced by fused in layers.*.mlp (12 nodes)"],
    ),
    "renamed modules keep their nodes": (
        layers(3), [f"model.{row}" for row in layers(3)], (0, 0, 9),
        ["module layers -> model.layers in 9 nodes"],
    ),
    "memsets are no kernels": (
        [], [MEMSET, CHILD], (2, 0, 0),
        ["memset of 64 bytes appeared in no module: 1 node more",
         "child graph appeared in no module: 1 node more"],
    ),
}  # fmt: skip
"""Rows before and after; how many nodes were added, removed and changed; and the sentences."""


@pytest.mark.parametrize(
    ("before", "after", "counts", "words"), SENTENCES.values(), ids=[*SENTENCES]
)
def test_changes_as_sentences(make_graph, before, after, counts, words):
    diff = diff_graphs(make_graph(*before), make_graph(*after))
    assert (len(diff.added), len(diff.removed), len(diff.changed), diff.figures) == (*counts, ())
    assert diff.words == tuple(words)
    assert diff.is_same is (words == ["nothing changed"])


def test_one_split_k_is_one_node_more_and_changes_no_other(make_graph):
    diff = diff_graphs(make_graph(*layers(4)), make_graph(*layers(4, with_reduce=[3])))
    assert [(n.index, n.short_name) for n in diff.added] == [(11, "splitKreduce_kernel")]
    assert (diff.removed, diff.changed) == ((), ())
    assert diff.words == ("split-K appeared in layers.3.mlp: 1 node more",)
    assert not diff.is_same


def test_split_k_with_another_kernel_before_it_is_a_replacement_and_a_node_more(make_graph):
    before = make_graph(*layers(2))
    rows = layers(2, with_reduce=[1])
    rows[4] = rows[4].replace("gemm", "gemm_splitK")
    diff = diff_graphs(before, make_graph(*rows))
    assert [node.short_name for node in diff.added] == ["splitKreduce_kernel"]
    assert fields(diff) == [("kernel", "gemm", "gemm_splitK")]
    assert diff.words == (
        "split-K appeared in layers.1.mlp: 1 node more",
        "kernel gemm replaced by gemm_splitK in layers.1.mlp (1 node)",
    )


def test_a_kernel_with_a_different_template_is_named_in_full(make_graph):
    before = make_graph({"short_name": "gemm", "name": "gemm<4>()"})
    after = make_graph({"short_name": "gemm", "name": "gemm<8>()"})
    assert fields(diff_graphs(before, after)) == [("kernel", "gemm<4>()", "gemm<8>()")]


@pytest.mark.parametrize(
    ("fact", "before", "after", "change"),
    [
        ("grid", (8, 1, 1), (16, 1, 1), ("grid", "8x1x1", "16x1x1")),
        ("block", (128, 1, 1), (256, 1, 1), ("block", "128x1x1", "256x1x1")),
        ("cluster", (), (2, 1, 1), ("cluster", "", "2x1x1")),
        ("shared_memory_bytes", 0, 1024, ("shared memory", "0 bytes", "1024 bytes")),
        ("registers", 32, 40, ("registers", "32", "40")),
        ("attributes", {"priority": "1"}, {}, ("attribute priority", "1", "")),
    ],
)
def test_each_fact_of_a_launch_is_compared(make_graph, fact, before, after, change):
    graphs = [make_graph({"short_name": "gemm", fact: value}) for value in (before, after)]
    diff = diff_graphs(*graphs)
    assert fields(diff) == [change]
    name, was, now = change
    assert diff.words == (f"{name} {was or 'none'} -> {now or 'none'} in 1 node of gemm",)


def test_the_same_change_in_many_nodes_is_one_sentence(make_graph):
    rows = [{"short_name": "gemm", "module": f"layers.{i}"} for i in range(24)]
    after = [{**row, "grid": (16, 1, 1)} for row in rows]
    diff = diff_graphs(make_graph(*rows), make_graph(*after))
    assert len(diff.changed) == 24
    assert diff.words == ("grid 8x1x1 -> 16x1x1 in 24 nodes of gemm",)


@pytest.mark.parametrize(
    ("grids", "words"),
    [
        ([9, 9, 8], ["grid 8x1x1 -> 9x1x1 in 2 nodes of gemm"]),
        ([9, 10, 11], [f"grid 8x1x1 -> {n}x1x1 in 1 node of gemm" for n in (9, 10, 11)]),
        ([9, 10, 11, 12], ["grid differs in 4 nodes of gemm"]),
        (
            [9, 9, 10, 11, 12],
            [
                "grid 8x1x1 -> 9x1x1 in 2 nodes of gemm",
                "grid differs in 3 more nodes of gemm",
            ],
        ),
    ],
)
def test_of_many_changes_those_of_several_nodes_are_spelled_out(make_graph, grids, words):
    rows = [{"short_name": "gemm", "module": f"layers.{i}"} for i in range(len(grids))]
    after = [{**row, "grid": (grid, 1, 1)} for row, grid in zip(rows, grids, strict=True)]
    assert diff_graphs(make_graph(*rows), make_graph(*after)).words == tuple(words)


def test_a_value_that_is_too_long_for_a_sentence_is_counted(make_graph):
    values = [Argument(size=4, kind="value", text=letter * 50) for letter in "ab"]
    diff = diff_graphs(*(with_argument(make_graph, value) for value in values))
    assert fields(diff) == [("argument 0", "a" * 50, "b" * 50)]
    assert (diff.words, diff.details) == ((), ("argument 0 of gemm: differs in 1 node",))


def test_arguments_are_details(make_graph):
    def numbers(text):
        return (Argument(size=4, kind="number", text=text),)

    row = {"short_name": "gemm"}
    before = make_graph({**row, "arguments": numbers("1")}, {**row, "grid": (2, 1, 1)})
    after = make_graph({**row, "arguments": numbers("2")}, {**row, "grid": (4, 1, 1)})
    diff = diff_graphs(before, after)
    assert diff.words == ("grid 2x1x1 -> 4x1x1 in 1 node of gemm",)
    assert diff.details == ("argument 0 of gemm: 1 -> 2 in 1 node",)


@pytest.mark.parametrize(
    ("kernels", "named"),
    [("ab", "a and b"), ("abb", "b and a"), ("abc", "a, b and c"), ("aabcd", "a, b and 2 more")],
)
def test_a_launch_that_changed_is_named_with_its_kernels(make_graph, kernels, named):
    rows = [{"short_name": name, "module": f"m{at}"} for at, name in enumerate(kernels)]
    after = [{**row, "registers": 255} for row in rows]
    rows = [{**row, "registers": 64} for row in rows]
    count = len(kernels)
    assert diff_graphs(make_graph(*rows), make_graph(*after)).words == (
        f"registers 64 -> 255 in {count} nodes of {named}",
    )


@pytest.mark.parametrize(
    ("before", "after", "is_shown"),
    [("-80", "48", False), ("0", "-80", False), ("0", "1", True)],
)
def test_a_byte_that_nothing_sets_is_no_change(make_graph, before, after, is_shown):
    values = [Argument(offset=4, size=1, kind="number", text=text) for text in (before, after)]
    graphs = [with_argument(make_graph, value) for value in values]
    assert diff_graphs(*graphs).is_same is not is_shown
    named = [dataclasses.replace(value, name="flag") for value in values]
    assert not diff_graphs(*(with_argument(make_graph, value) for value in named)).is_same


def test_times_and_source_lines_are_no_change_of_a_node(make_graph):
    row = {"short_name": "gemm"}
    after = {**row, "duration_us": 3.0, "start_us": 1.0, "source": "b.py:2 in f", "scope": "s"}
    assert diff_graphs(make_graph(row), make_graph(after)).is_same


def test_a_number_that_changed_is_named_with_its_kernel(make_graph):
    numbers = [Argument(name=n, size=4, kind="number", text=t) for n, t in (("", "8"), ("m", "64"))]
    other = dataclasses.replace(numbers[1], text="128")
    diff = diff_graphs(
        with_argument(make_graph, *numbers), with_argument(make_graph, *numbers[:1], other)
    )
    assert fields(diff) == [("argument 1 m", "64", "128")]
    assert diff.details == ("argument 1 m of gemm: 64 -> 128 in 1 node",)


@pytest.mark.parametrize("named", [0, 1])
def test_a_record_without_the_names_of_arguments_has_the_same_arguments(make_graph, named):
    """As records of earlier versions, which have no names of Triton's parameters."""
    arguments = [
        [Argument(name="n" * (i == named), size=4, kind="number", text=text) for text in texts]
        for i, texts in enumerate(("88", "89"))
    ]
    diff = diff_graphs(*(with_argument(make_graph, *each) for each in arguments))
    assert fields(diff) == [("argument 1 n", "8", "9")]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (("weight", "w", 0x7F00), ("weight", "w", 0x7F80)),
        (("pool", "pool+0x100", 0x7F00), ("pool", "pool+0x180", 0x7F80)),
        (
            ("external", "external block 0x7f0000000000", 0x7F0000000000),
            ("external", "external block 0x7f0000001000", 0x7F0000001000),
        ),
        (("host", "host 0x7f0000000000", 1), ("host", "host 0x7f0000001000", 2)),
    ],
)
def test_a_different_address_of_the_same_memory_is_no_change(make_graph, before, after):
    graphs = [with_argument(make_graph, pointer(*each)) for each in (before, after)]
    assert diff_graphs(*graphs).is_same


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (("weight", "w", 1), ("weight", "v", 1), ("weight w", "weight v")),
        (("weight", "w+0x40", 1), ("weight", "w+0x80", 1), ("weight w+0x40", "weight w+0x80")),
        (("weight", "w", 1), ("pool", "pool+0x10", 1), ("weight w", "pool")),
        (
            ("external", "external block 0x7f0000000000+0x40", 1),
            ("freed", "freed block 0x7f0000000000+0x40", 1),
            ("external block +0x40", "freed block +0x40"),
        ),
    ],
)
def test_different_memory_is_a_change(make_graph, before, after, said):
    graphs = [with_argument(make_graph, pointer(*each)) for each in (before, after)]
    assert fields(diff_graphs(*graphs)) == [("argument 0", *said)]


def struct(text, *pointers):
    found = tuple(Pointer(address=a, memory=m, name=n) for m, n, a in pointers)
    return Argument(size=64, kind="struct", text=text, pointers=found)


def test_a_struct_is_compared_by_its_bytes_and_the_targets_of_its_pointers(make_graph):
    def changes(before, after):
        return fields(diff_graphs(*(with_argument(make_graph, each) for each in (before, after))))

    one = struct("64 bytes #aa: w, pool+0x10", ("weight", "w", 1), ("pool", "pool+0x10", 2))
    moved = struct("64 bytes #aa: w, pool+0x100", ("weight", "w", 9), ("pool", "pool+0x100", 8))
    frozen = struct("64 bytes #bb: w, pool+0x10", ("weight", "w", 1), ("pool", "pool+0x10", 2))
    assert changes(one, moved) == []
    assert changes(one, frozen) == [
        ("argument 0", "64 bytes #aa: weight w, pool", "64 bytes #bb: weight w, pool")
    ]


def test_the_arguments_of_another_kernel_are_not_compared(make_graph):
    number = Argument(size=4, kind="number", text="8")
    before = make_graph({"short_name": "gemm", "op": "mm", "arguments": (number,)})
    after = make_graph({"short_name": "gemv", "op": "mm", "arguments": (number, number)})
    assert fields(diff_graphs(before, after)) == [("kernel", "gemm", "gemv")]


def test_an_edge_that_became_programmatic_is_a_change_of_its_target(make_graph):
    rows = ("m op a", "m op b")
    before = make_graph(*rows)
    after = make_graph(*rows, edges=(Edge(source=0, target=1, kind="programmatic"),))
    diff = diff_graphs(before, after)
    assert [node.after for node in diff.changed] == [1]
    assert fields(diff) == [("edge from #0 a", "full", "programmatic")]
    assert diff.words == ("edge full -> programmatic in 1 node of b",)


@pytest.mark.parametrize("order", [1, -1])
def test_a_direct_edge_counts_beside_a_path_through_a_new_node(make_graph, order):
    """Whatever the order of the edges is."""
    before = make_graph("m op a", "m op b", edges=(Edge(source=0, target=1),))
    edges = (
        Edge(source=0, target=2, kind="programmatic"),
        Edge(source=0, target=1),
        Edge(source=1, target=2),
    )
    after = make_graph("m op a", "m op x", "m op b", edges=edges[::order])
    assert fields(diff_graphs(before, after)) == [("edge from #0 a", "full", "programmatic")]


def test_a_removed_edge_is_a_change(make_graph):
    rows = ("m op a", "m op b", "m op c")
    after = make_graph(*rows, edges=(Edge(source=0, target=1),))
    assert fields(diff_graphs(make_graph(*rows), after)) == [("edge from #1 b", "full", "")]


def test_an_order_through_a_new_node_is_no_change(make_graph):
    before = make_graph("m op a", "m op b")
    after = make_graph("m op a", "m new x", "m new y", "m op b")
    diff = diff_graphs(before, after)
    assert len(diff.added) == 2
    assert diff.changed == ()


def test_nodes_without_modules_are_aligned_by_their_kernels(make_graph):
    names = ["norm", "gemm", "gelu", "gemm"] * 50
    before = [f"- - {name}" for name in names]
    after = [*before[:101], "- - reduce", *before[101:]]
    diff = diff_graphs(make_graph(*before), make_graph(*after))
    assert [node.index for node in diff.added] == [101]
    assert diff.words == ("kernel reduce appeared in no module: 1 node more",)


def test_a_larger_memset_is_the_same_node(make_graph):
    memsets = ({"kind": "memset", "short_name": f"memset of {n} bytes"} for n in (64, 128))
    diff = diff_graphs(*(make_graph(memset) for memset in memsets))
    assert fields(diff) == [("name", "memset of 64 bytes", "memset of 128 bytes")]
    assert diff.words == (
        "memset of 64 bytes replaced by memset of 128 bytes in no module (1 node)",
    )


def test_timing_and_memory_are_figures(make_graph):
    timing = Timing(
        replays=20, p50_us=10.0, p95_us=12.0, critical_path=(0,),
        critical_us=8.0, bound_by="order",
    )  # fmt: skip
    before = make_graph("m op a", timing=timing, memory=GraphMemory(graph_bytes=1, pool_bytes=2))
    after = dataclasses.replace(before, timing=dataclasses.replace(timing, p50_us=9.0), memory=None)
    diff = diff_graphs(before, after)
    assert [(f.name, f.before, f.after) for f in diff.figures] == [
        ("p50_us", 10.0, 9.0), ("graph_bytes", 1, None), ("pool_bytes", 2, None),
    ]  # fmt: skip
    assert diff.is_same


sequence = st.lists(st.sampled_from("abcd"), max_size=12)


def most_pairs(before, after):
    """The length of the longest common subsequence, by the textbook's table."""
    row = [0] * (len(after) + 1)
    for key in before:
        last = 0
        for j, other in enumerate(after, 1):
            last, row[j] = row[j], last + 1 if key == other else max(row[j], row[j - 1])
    return row[-1]


@settings(deadline=None, derandomize=True, max_examples=150)
@given(sequence, sequence)
def test_pairs_are_equal_in_order_and_as_many_as_can_be(before, after):
    pairs = align(before, after)
    assert all(before[i] == after[j] for i, j in pairs)
    assert all(i < k and j < m for (i, j), (k, m) in itertools.pairwise(pairs))
    assert len(pairs) == most_pairs(before, after)


def test_only_an_inserted_key_has_no_pair():
    layers = ["norm", "gemm", "gelu", "gemm"] * 300
    more = [*layers[:602], "reduce", *layers[602:]]
    assert align(layers, more) == [(i, i + (i >= 602)) for i in range(1200)]


class CountedKey(str):
    """A key that counts comparisons."""

    __slots__ = ()
    __hash__ = str.__hash__
    comparisons = 0

    def __eq__(self, other):
        CountedKey.comparisons += 1
        return str.__eq__(self, other)


def test_the_work_grows_with_the_square_of_the_insertions_alone():
    """Not with the product of the lengths, here 800,000, though few keys repeat often."""
    names, num_layers = ("norm", "gemm", "reduce", "reduce", "gelu"), 200
    after = [CountedKey(name) for _ in range(num_layers) for name in names]
    before = [key for at, key in enumerate(after) if at % 5 != 3]
    CountedKey.comparisons = 0
    assert len(align(before, after)) == len(before)
    assert CountedKey.comparisons < len(after) + 2 * num_layers**2


def test_unrelated_sequences_are_not_paired():
    assert align(list(range(1600)), list(reversed(range(1600)))) == []
    assert align(["a"] * 5, ["b"] * 5) == []
