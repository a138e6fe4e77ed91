"""Graphs of the reference target: every operation of every mode has an origin."""

from __future__ import annotations

import pytest

import graphkit as gk

SIZE = 2
STAGES = {"(refresh)", "(metadata)", "(step)", "(forward)"}
MODEL_OF = {
    "TARGET_VERIFY": "target", "DECODE": "target", "DRAFT": "draft", "DRAFT_EXTEND": "draft",
    "DRAFT_EXTEND_V2": "draft", "MULTI_LAYER_EAGLE": "chain",
}  # fmt: skip


def record_of(target, mode, *, attribution=True):
    with target.runner(mode, batch_sizes=[SIZE], device="cpu") as runner:
        runner.capture(attribution=gk.Attribution(target.weights) if attribution else None)
        return runner.inspect(SIZE, weights=target.weights)


@pytest.fixture(scope="module", params=list(MODEL_OF))
def record(request, target):
    return record_of(target, gk.ForwardMode[request.param])


def pointers(record):
    return [p for node in record.nodes for a in node.arguments for p in a.pointers]


def test_every_operation_has_a_module(record):
    modules = {node.module for node in record.nodes}
    assert all(modules)
    assert {"(refresh)", "(metadata)"} <= modules
    allowed = (f"{MODEL_OF[record.mode]}.", "target.", *STAGES)
    others = {name for name in modules if not name.startswith(allowed)}
    assert others <= {MODEL_OF[record.mode], "Linear"}, "MTP layers call the head of the target"
    assert any(name.endswith("self_attn") for name in modules)


def test_every_operation_of_a_module_has_a_line(record):
    for node in record.nodes:
        has_line = node.module == "(forward)" or node.module not in STAGES
        assert bool(node.source) == has_line, node
        assert "::" in node.op
        assert not node.source.startswith(("runners/", "graphs/", "ops/", "attention/"))


def test_the_refresh_is_one_node_and_comes_first(record):
    refresh = [node for node in record.nodes if node.module == "(refresh)"]
    assert [(node.index, node.op) for node in refresh] == [(0, "graphkit::refresh")]


def test_a_matrix_product_reads_the_weight_of_its_module(record):
    for node in record.nodes:
        is_tied = node.module.endswith(("lm_head", "Linear"))
        if node.short_name in ("mm", "addmm") and not is_tied:
            weights = {p.name for a in node.arguments for p in a.pointers if p.memory == "weight"}
            assert f"{node.module}.weight" in weights


def test_every_address_has_a_name(record):
    kinds = {pointer.memory for pointer in pointers(record)}
    assert {"weight", "input", "state", "mailbox", "pool"} <= kinds
    names = {pointer.name for pointer in pointers(record) if pointer.memory == "input"}
    assert {"seq_lens", "req_pool_indices", "out_cache_loc"} <= names


def test_every_operation_that_reads_a_result_has_an_edge(record):
    assert all(edge.source < edge.target for edge in record.edges)
    assert len(set(record.edges)) == len(record.edges)
    targets = {edge.target for edge in record.edges}
    for node in record.nodes:
        given = [argument for argument in node.arguments if not argument.name.startswith("->")]
        reads = {p.memory for argument in given for p in argument.pointers}
        if "pool" in reads:
            assert node.index in targets, node
        elif not reads:
            assert node.index not in targets, node


def test_a_record_has_its_mode_and_size(record):
    assert record.batch_size == SIZE
    assert record.name == f"{record.mode} {SIZE}"
    assert gk.GraphRecord.from_json(record.to_json()) == record


def test_attribution_changes_no_operation(target, record):
    plain = record_of(target, gk.ForwardMode[record.mode], attribution=False)
    assert [node.op for node in plain.nodes] == [node.op for node in record.nodes]
    assert {(node.module, node.source, node.scope) for node in plain.nodes} == {("", "", "")}


def test_the_record_has_user_scopes(target):
    mode = gk.ForwardMode.DECODE
    forward = target.forwards[mode]

    def scoped(inputs):
        with gk.scope("model"):
            output = forward(inputs)
        with gk.scope("sampler"):
            output.next_token_logits.argmax(-1)
        return output

    runner = gk.DecodeRunner(
        scoped, spec=target.spec, sizes=target.sizes, batch_sizes=[SIZE], device="cpu",
        attention=target.attention[mode], mutable_state=target.mutable_state,
    )  # fmt: skip
    runner.capture(attribution=gk.Attribution(target.weights))
    nodes = runner.inspect(SIZE).nodes
    assert [n.short_name for n in nodes if n.scope == "sampler"] == ["argmax"]
    assert {n.module for n in nodes if not n.scope} <= {"(refresh)", "(metadata)", "(step)"}
    assert {n.module for n in nodes if n.scope == "sampler"} == {"(forward)"}
