"""The part of a step that each node belongs to, and the modules of a replay as boxes."""

from __future__ import annotations

import dataclasses
import math
from itertools import pairwise

import pytest

from graphkit.records import Node
from graphkit.views.icicle import module_levels
from graphkit.views.node_parts import common_part, node_parts


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


def boxes(level):
    return [(box.begin, box.end, box.name, box.part) for box in level.boxes]


def test_modules_are_boxes_inside_the_boxes_of_the_modules_around_them(of_modules):
    graph = of_modules("(refresh)", "m.0.mlp", "m.0.mlp.up", "m.1.mlp", "", "m.1.norm")
    levels = module_levels(graph)
    assert boxes(levels[0]) == [
        (0.0, 1.0, "(refresh)", "refresh"), (1.0, 4.0, "m", "mlp"), (5.0, 6.0, "m", "norm"),
    ]  # fmt: skip
    assert [box[:3] for box in boxes(levels[1])] == [
        (1.0, 3.0, "0"), (3.0, 4.0, "1"), (5.0, 6.0, "1"),
    ]  # fmt: skip
    assert [box[2] for box in boxes(levels[3])] == ["up"]
    for outer, inner in pairwise(levels):
        for box in inner.boxes:
            around = outer.at(box.begin)
            assert around.begin <= box.begin <= box.end <= around.end


def test_a_box_ends_where_the_next_one_begins(of_modules):
    graph = of_modules("a.x", "b", "a.y")
    longer = dataclasses.replace(graph.nodes[0], duration_us=5.0)
    levels = module_levels(dataclasses.replace(graph, nodes=(longer, *graph.nodes[1:])))
    assert [box[:3] for box in boxes(levels[0])] == [
        (0.0, 1.0, "a"),
        (1.0, 2.0, "b"),
        (2.0, 3.0, "a"),
    ]
    assert [box[:3] for box in boxes(levels[1])] == [(0.0, 1.0, "x"), (2.0, 3.0, "y")]


def test_a_level_finds_the_box_at_a_time_and_none_between_boxes(of_modules):
    (level,) = module_levels(of_modules("a", "", "b"))
    found = [level.at(time) for time in (-1.0, 0.0, 0.5, 1.0, 1.5, 2.0, 3.0)]
    assert [box and box.name for box in found] == [None, "a", "a", None, None, "b", None]


def test_the_largest_share_of_a_time_is_that_of_one_box(of_modules):
    (level,) = module_levels(of_modules("a", "b", "b", "b"))
    assert level.largest_share(0.0, 4.0) == 0.75
    assert level.largest_share(0.5, 1.5) == 0.5


def test_a_whole_step_has_its_phases_outermost(of_modules):
    graph = of_modules("draft.layers", "target.layers", mode="STEP", scopes=("draft", "verify"))
    assert [box.name for box in module_levels(graph)[0].boxes] == ["draft", "verify"]


def test_nodes_without_a_time_or_with_an_endless_one_have_no_box(of_modules):
    graph = of_modules("a", "b")
    times = ((None, None), (0.0, math.inf))
    nodes = [
        dataclasses.replace(each, start_us=start, duration_us=us)
        for each, (start, us) in zip(graph.nodes, times, strict=True)
    ]
    assert module_levels(dataclasses.replace(graph, nodes=tuple(nodes))) == ()
