"""Parts of a step."""

from __future__ import annotations

import dataclasses

import pytest

from graphkit.records import Node
from graphkit.views.module_tree import node_parts


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
