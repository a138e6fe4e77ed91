"""Graphs of a model whose modules were renamed or moved match node by node."""

from __future__ import annotations

import dataclasses

import pytest

from graphkit import Attribution, ForwardMode
from graphkit.models.reference import reference_target
from graphkit.records import (
    Argument,
    Edge,
    ForeignRecord,
    GraphRecord,
    Node,
    Pointer,
    Process,
)
from graphkit.views.diff import diff_graphs, diff_records


@pytest.fixture(scope="module")
def recorded():
    """A verify graph of the reference model, with four layers."""
    target = reference_target()
    with target.runner(ForwardMode.TARGET_VERIFY, batch_sizes=[1], device="cpu") as runner:
        runner.capture(attribution=Attribution(target.weights))
        return runner.inspect(1, weights=target.weights)


def renamed(record, before, after):
    """Rename modules and weights in the record's text."""
    return GraphRecord.from_json(record.to_json().replace(before, after))


def with_kernel(record, after, name):
    """Add a kernel in the module of the node ``after``, between this node and the next one."""
    nodes = list(record.nodes)
    new = Node(
        index=len(nodes), kind="op", name=name, short_name=name, op=name,
        module=nodes[after].module,
    )  # fmt: skip
    moved = [*nodes[: after + 1], new, *nodes[after + 1 :]]
    index = {node.index: at for at, node in enumerate(moved)}
    return dataclasses.replace(
        record,
        nodes=tuple(dataclasses.replace(node, index=index[node.index]) for node in moved),
        edges=tuple(
            Edge(source=index[e.source], target=index[e.target], kind=e.kind) for e in record.edges
        ),
    )


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("target.model.", "target.model.inner.", [
            "target.model.embed_tokens -> target.model.inner.embed_tokens",
            "target.model.layers -> target.model.inner.layers",
            "target.model.norm -> target.model.inner.norm",
        ]),
        ("target.", "verifier.", ["target -> verifier"]),
        ("target.", "", ["target.lm_head -> lm_head", "target.model -> model"]),
        ("target.", "wrapper.target.", ["target -> wrapper.target"]),
        (".mlp", ".feed_forward", [
            "target.model.layers.*.mlp -> target.model.layers.*.feed_forward"
        ]),
        (".self_attn", ".block.self_attn", [
            "target.model.layers.*.self_attn -> target.model.layers.*.block.self_attn"
        ]),
        ("target.model.layers", "target.model.blocks", [
            "target.model.layers -> target.model.blocks"
        ]),
    ],
)  # fmt: skip
def test_a_renamed_module_of_the_reference_model_is_one_change(recorded, before, after, words):
    other = renamed(recorded, before, after)
    for diff, sign in ((diff_graphs(recorded, other), 1), (diff_graphs(other, recorded), -1)):
        assert (diff.added, diff.removed, diff.changed) == ((), (), ())
        found = {s.removeprefix("module renamed: ") for s in diff.words}
        assert found == {" -> ".join(sentence.split(" -> ")[::sign]) for sentence in words}
        assert not diff.is_same


def test_a_kernel_that_was_added_to_a_renamed_module_is_found(recorded):
    at = next(n.index for n in recorded.nodes if n.module == "target.model.layers.2.self_attn")
    after = renamed(with_kernel(recorded, at, "aten::clamp"), "target.model.", "llama.")
    diff = diff_graphs(recorded, after)
    assert [(n.index, n.module, n.op) for n in diff.added] == [
        (at + 1, "llama.layers.2.self_attn", "aten::clamp")
    ]
    assert (diff.removed, diff.changed) == ((), ())
    assert diff.renamed == {"target.model": "llama"}
    assert diff.words == (
        "module renamed: target.model -> llama",
        "op aten::clamp appeared in llama.layers.2.self_attn: 1 node more",
    )
    back = diff_graphs(after, recorded)
    assert [n.module for n in back.removed] == ["llama.layers.2.self_attn"], "its own path"


def test_an_operation_with_another_kernel_in_a_renamed_module_is_a_replacement(make_graph):
    before = make_graph("a.x mm gemm", "a.x gelu gelu", "a.x mm gemm")
    after = make_graph("b.x mm gemm", "b.x gelu gelu", "b.x mm gemm_splitK")
    assert diff_graphs(before, after).words == (
        "module renamed: a -> b",
        "kernel gemm replaced by gemm_splitK in b.x (1 node)",
    )


def test_a_module_that_both_graphs_contain_was_not_renamed(make_graph):
    before = make_graph("a op one", "b op two")
    assert diff_graphs(before, make_graph("a op one", "a op two")).words == (
        "module b -> a in 1 node of two",
    )


def test_one_equal_kernel_in_two_large_modules_is_no_rename(make_graph):
    before = make_graph("a op x", "a op y", "a op z")
    after = make_graph("b op z", "b op v", "b op w")
    assert diff_graphs(before, after).renamed == {}


def test_two_halves_of_a_module_that_went_apart_are_two_renames(make_graph):
    before = make_graph("a.x op one", "a.y op two")
    after = make_graph("b.x op one", "c.y op two")
    assert diff_graphs(before, after).renamed == {"a.x": "b.x", "a.y": "c.y"}


def test_another_weight_in_a_renamed_module_is_a_change(make_graph):
    def graph(module, *weights):
        found = tuple(Pointer(address=1, memory="weight", name=name) for name in weights)
        argument = Argument(size=64, kind="struct", text=", ".join(weights), pointers=found)
        return make_graph({"short_name": "gemm", "module": module, "arguments": (argument,)})

    before = graph("a.up", "a.up.weight", "a.down.weight+0x40")
    same = diff_graphs(before, graph("b.up", "b.up.weight", "b.down.weight+0x40"))
    assert same.words == ("module renamed: a -> b",)
    other = diff_graphs(before, graph("b.up", "b.up.weight", "b.gate.weight+0x40"))
    ((change,),) = [node.changes for node in other.changed]
    assert (change.before, change.after) == (
        "weight b.up.weight, weight a.down.weight+0x40",
        "weight b.up.weight, weight b.gate.weight+0x40",
    )


def test_a_weight_whose_module_was_renamed_in_another_graph_is_the_same(make_graph):
    """As a drafter that reads the target's embedding."""

    def record(path):
        pointer = Pointer(address=1, memory="weight", name=f"{path}.embed.weight")
        reads = Argument(size=8, kind="pointer", text=pointer.name, pointers=(pointer,))
        rows = [
            {"short_name": "gather", "module": m, "arguments": (reads,)} for m in (path, "draft")
        ]
        target, draft = (make_graph(row, name=row["module"], captured_at="a.py:1") for row in rows)
        return ForeignRecord(
            command=("python",), exit_code=0, environment=target.environment,
            processes=(Process(pid=1, command=("python",)),),
            graphs=(dataclasses.replace(target, name="target"), draft),
        )  # fmt: skip

    diff = diff_records(record("target.model"), record("target"))
    assert [graph.words for graph in diff.graphs] == [
        ("module renamed: target.model -> target",), ("nothing changed",),
    ]  # fmt: skip
