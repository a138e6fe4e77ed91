"""Parts of a step, and the frames of modules."""

from __future__ import annotations

import dataclasses

import pytest

from graphkit.records import GraphRecord, Node
from graphkit.views.frames import module_frames
from graphkit.views.module_tree import common_part, node_parts


def node(index, module="", **facts):
    return Node(index=index, kind="kernel", name="k", short_name="k", module=module, **facts)


@pytest.fixture
def of_modules(graph):
    """``of_modules(*modules, mode=...)``: a graph with one measured node of 1 us per module."""

    def make(*modules, mode="TARGET_VERIFY", scopes=()):
        nodes = tuple(
            node(i, module, start_us=float(i), duration_us=1.0, scope=scopes[i] if scopes else "")
            for i, module in enumerate(modules)
        )
        return dataclasses.replace(graph, mode=mode, nodes=nodes, edges=(), timing=None)

    return make


@pytest.mark.parametrize(
    ("module", "part"),
    [
        ("(refresh)", "refresh"), ("(metadata)", "metadata"), ("(forward)", ""), ("", ""),
        ("target.model.embed_tokens", "embed"), ("model.rotary_emb", "embed"), ("h.wte", "embed"),
        ("model.layers.0.self_attn.q_proj", "attn"), ("h.3.attn.c_attn", "attn"),
        ("model.layers.0.self_attn.q_norm", "attn"), ("model.layers.9.linear_attn", "attn"),
        ("model.layers.0.post_attention_layernorm", "norm"), ("h.0.ln_1", "norm"),
        ("model.layers.0.mlp.down_proj", "mlp"), ("layers.0.block_sparse_moe.gate", "mlp"),
        ("target.lm_head", "head"), ("model.layers.0", ""),
    ],
)  # fmt: skip
def test_the_names_of_modules_say_the_part(of_modules, module, part):
    assert node_parts(of_modules(module)) == {0: part}


def test_the_phases_of_a_whole_step_come_before_the_parts_of_its_models(of_modules):
    modules = ("(refresh)", "draft.layers.0.mlp", "target.layers.0.self_attn", "(forward)")
    graph = of_modules(*modules, mode="STEP", scopes=("", "draft", "verify", "accept"))
    assert list(node_parts(graph).values()) == ["refresh", "draft", "verify", "accept"]
    assert list(node_parts(dataclasses.replace(graph, mode="")).values())[1:3] == ["mlp", "attn"]


def test_several_parts_have_no_common_one():
    assert (common_part(["mlp", "mlp"]), common_part(["mlp", "attn"]), common_part([])) == (
        "mlp", "", "",
    )  # fmt: skip


def graph_of(environment, *rows, mode=""):
    """A graph of rows of module, kernel and time, and of a scope if there is one."""
    nodes = [
        Node(
            index=index, kind="kernel", name=kernel, short_name=kernel, module=module,
            duration_us=time, scope=next(iter(scope), ""),
        )
        for index, (module, kernel, time, *scope) in enumerate(rows)
    ]  # fmt: skip
    return GraphRecord(
        name="g", backend="cuda", environment=environment, mode=mode, nodes=tuple(nodes)
    )


@pytest.fixture
def make(graph):
    return lambda *rows, **facts: graph_of(graph.environment, *rows, **facts)


def layers(*kernels):
    return [(f"m.layers.{n}.mlp", kernel, 1.0) for n, kernel in enumerate(kernels)]


def shown(record):
    return [(frame.path, frame.name, frame.width) for frame in module_frames(record)[0]]


def test_equal_layers_share_a_frame_that_has_the_time_of_all(make):
    record = make(("m.embed", "gather", 2.0), *layers("gemm", "gemm", "gemm"))
    assert shown(record) == [
        ("", "", 5.0),
        ("m", "m", 5.0),
        ("m.embed", "embed", 2.0),
        ("m.layers.*.mlp", "layers.*.mlp (3 x)", 3.0),
    ]


def test_a_layer_of_other_kernels_has_a_frame_of_its_own(make):
    found = shown(make(*layers("first", "gemm", "gemm", "gemm", "gemm")))
    assert found[1:] == [
        ("m.layers", "m.layers", 5.0),
        ("m.layers.0.mlp", "0.mlp", 1.0),
        ("m.layers.1,2,..,4.mlp", "1,2,..,4.mlp (4 x)", 4.0),
    ]


def test_experts_of_all_layers_share_a_frame(make):
    rows = [(f"layers.{n}.{k}", "gemm", 1.0) for n in range(2) for k in range(3)]
    assert shown(make(("", "copy", 1.0), *rows))[1:] == [("layers.*.*", "layers.*.* (6 x)", 6.0)]


def test_every_frame_lies_in_the_one_around_it_and_beside_its_neighbours(graph):
    frames, places = module_frames(graph)
    assert len(places) == len(graph.nodes)
    reached = {}
    for at, frame in enumerate(frames[1:], 1):
        around = frames[frame.parent]
        assert frame.parent < at
        assert frame.begin == pytest.approx(reached.get(frame.parent, around.begin))
        reached[frame.parent] = frame.begin + frame.width
        assert reached[frame.parent] <= around.begin + around.width + 1e-6
        assert frame.path.startswith(around.path)
    counts = [0] * len(frames)
    for node in graph.nodes:
        at = places[node.index]
        while at is not None:
            counts[at] += 1
            at = frames[at].parent
    assert counts == [frame.num_nodes for frame in frames]


def test_the_frames_of_a_whole_step_begin_with_its_phases(make):
    rows = [("(refresh)", "copy", 1.0, ""), ("m.mlp", "gemm", 2.0, "verify"),
            ("m.mlp", "gemm", 3.0, "draft")]  # fmt: skip
    assert [path for path, _, _ in shown(make(*rows, mode="STEP"))] == [
        "", "(refresh)", "verify", "verify.m.mlp", "draft", "draft.m.mlp",
    ]  # fmt: skip


def test_widths_are_numbers_of_nodes_if_no_time_is_known(make):
    rows = [("m.a", "gemm", None), ("m.a", "gemm", None), ("m.b", "gemm", None)]
    frames, _ = module_frames(make(*rows))
    assert [(frame.path, frame.begin, frame.width) for frame in frames] == [
        ("", 0, 3), ("m", 0, 3), ("m.a", 0, 2), ("m.b", 2, 1),
    ]  # fmt: skip
    assert {frame.us for frame in frames} == {None}


def test_a_graph_without_nodes_has_its_own_frame(make):
    frames, places = module_frames(make())
    assert ([frame.width for frame in frames], places) == ([0.0], [])


def test_nodes_inside_a_measured_child_graph_are_not_counted_again(make):
    record = make(("m.a", "child graph", 4.0), ("m.b", "gemm", 3.0))
    inside = dataclasses.replace(record.nodes[1], parent=0)
    frames, _ = module_frames(dataclasses.replace(record, nodes=(record.nodes[0], inside)))
    assert [(frame.path, frame.us) for frame in frames] == [
        ("", 4.0), ("m", 4.0), ("m.a", 4.0), ("m.b", 3.0),
    ]  # fmt: skip
    assert frames[0].width == 7.0, "as wide as what is inside"
