"""Records of CUDA graphs of models: the reference, one of transformers, a compiled function."""

from __future__ import annotations

import pytest
import torch

import graphkit as gk
from graphkit.models.reference import reference_target

pytestmark = pytest.mark.gpu
SIZE = 8


@pytest.fixture(scope="module")
def verify():
    """Runner, target and record of the reference verify graph."""
    target = reference_target("cuda", max_batch_size=SIZE)
    with target.runner(gk.ForwardMode.TARGET_VERIFY, batch_sizes=[SIZE], device="cuda") as runner:
        runner.capture(attribution=gk.Attribution(target.weights))
        batch = target.batch(gk.ForwardMode.TARGET_VERIFY, SIZE, 1)
        record = runner.inspect(SIZE, weights=target.weights, replay=lambda: runner.replay(batch))
        yield runner, target, record


def share_in_modules(record):
    kernels = [node for node in record.nodes if node.kind == "kernel"]
    assert len(kernels) > 20
    return sum(bool(node.module) for node in kernels) / len(kernels)


def arguments_of(record):
    return [argument for node in record.nodes for argument in node.arguments]


def pointers_of(record):
    return [pointer for argument in arguments_of(record) for pointer in argument.pointers]


def test_every_kernel_of_the_verify_graph_belongs_to_a_module(verify):
    record = verify[2]
    assert share_in_modules(record) >= 0.99
    modules = {node.module for node in record.nodes}
    assert {"(refresh)", "(metadata)", "target.lm_head"} <= modules
    assert any(name.startswith("target.model.layers.0.") for name in modules)


def test_every_node_of_a_module_names_its_operation_and_line(verify):
    of_modules = [node for node in verify[2].nodes if node.module.startswith("target.")]
    assert all("::" in node.op for node in of_modules)
    assert all(" in " in node.source for node in of_modules)


def test_no_argument_is_unreadable(verify):
    arguments = arguments_of(verify[2])
    assert len(arguments) > 100
    assert not [argument for argument in arguments if argument.kind == "unreadable"]


def test_pointers_have_names(verify):
    pointers = pointers_of(verify[2])
    kinds = {pointer.memory for pointer in pointers}
    assert {"weight", "input", "state", "mailbox", "pool"} <= kinds
    assert "freed" not in kinds
    names = {pointer.name for pointer in pointers if pointer.memory == "weight"}
    assert any(name.endswith("self_attn.q_proj.weight") for name in names)
    fields = {pointer.name for pointer in pointers if pointer.memory == "input"}
    assert {"input_ids", "positions", "seq_lens", "out_cache_loc"} <= fields


def test_every_matrix_product_reads_its_own_weight(verify):
    """cuBLAS passes arguments in one buffer, and the weight in a descriptor inside of it."""
    ops, sums = ("aten::mm", "graphkit::linear"), ("splitk", "sum_parts")
    products = [node for node in verify[2].nodes if node.op in ops]
    products = [node for node in products if node.module != "target.lm_head"]  # tied
    assert products
    for node in products:
        names = {p.name.split("+")[0] for a in node.arguments for p in a.pointers}
        is_sum = any(each in node.name.lower() for each in sums)
        assert f"{node.module}.weight" in names or is_sum, node


def test_products_of_few_rows_start_while_the_kernel_before_runs(verify):
    record = verify[2]
    places = [
        place for place, node in enumerate(record.nodes) if node.short_name == "linear_kernel"
    ]
    kinds = {edge.target: edge.kind for edge in record.edges}
    assert places
    assert {kinds[place] for place in places} == {"programmatic"}


def test_kernels_have_all_fields(verify):
    kernels = [node for node in verify[2].nodes if node.kind == "kernel"]
    assert all(len(node.grid) == 3 and len(node.block) == 3 for node in kernels)
    assert all(node.registers > 0 for node in kernels)
    assert not any(node.name.startswith("_Z") for node in kernels)
    assert all(len(node.short_name) < 100 for node in kernels)


def test_a_captured_step_is_one_chain(verify):
    record = verify[2]
    assert len(record.edges) >= len(record.nodes) - 1
    assert {edge.target for edge in record.edges} == set(range(1, len(record.nodes)))


def test_every_node_has_its_time(verify):
    record = verify[2]
    assert all(node.duration_us > 0 for node in record.nodes if node.kind == "kernel")
    timing = record.timing
    assert timing.bound_by == "order"
    assert timing.replays >= 10
    timeline = record.timeline
    assert timeline.end_us == pytest.approx(timing.p50_us, rel=0.2)
    assert timing.unprofiled_us > 0
    assert 0 < timing.critical_us <= timing.p50_us * 1.05
    assert timing.p50_us <= timing.p95_us
    starts = [node.start_us for node in record.nodes if node.kind == "kernel"]
    assert starts == sorted(starts)


def test_the_record_has_the_memory_of_the_pool(verify):
    runner, _, record = verify
    assert record.memory.pool_bytes == runner.backend.pool.num_bytes()
    assert {segment.pool for segment in record.memory.segments} >= {"graph", "default"}


def test_attribution_does_not_change_the_graph(verify):
    _, target, record = verify
    mode = gk.ForwardMode.TARGET_VERIFY
    with target.runner(mode, batch_sizes=[SIZE], device="cuda") as plain:
        plain.capture()
        other = plain.inspect(SIZE, weights=target.weights)
    assert [node.name for node in other.nodes] == [node.name for node in record.nodes]
    assert [node.grid for node in other.nodes] == [node.grid for node in record.nodes]
    assert not any(node.module for node in other.nodes)


def test_a_transformers_llama(kept_graph):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=4,
        num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=128,
    )  # fmt: skip
    model = LlamaForCausalLM(config).cuda().bfloat16().eval()
    ids = torch.randint(0, 512, (4, 16), device="cuda")
    positions = torch.arange(16, device="cuda").expand(4, -1)
    where = gk.Attribution(model)
    graph = kept_graph(
        lambda: model(input_ids=ids, position_ids=positions, use_cache=False).logits, where
    )
    record = gk.inspect_graph(graph, names=model, attribution=where, replay=graph.replay)
    assert share_in_modules(record) >= 0.99
    assert not [a for a in arguments_of(record) if a.kind == "unreadable"]
    modules = {node.module for node in record.nodes}
    assert {"model.layers.3.mlp.down_proj", "model.norm", "lm_head"} <= modules
    assert {"model.layers.0.self_attn.q_proj.weight"} <= {p.name for p in pointers_of(record)}
    assert record.timing is not None


def test_a_compiled_function_stays_compiled(kept_graph):
    @torch.compile
    def fused(x):
        return (x * 2 + 1).sin() * x

    x = torch.randn(1000, device="cuda")
    plain = gk.inspect_graph(kept_graph(lambda: fused(x)))
    where = gk.Attribution()
    record = gk.inspect_graph(kept_graph(lambda: fused(x), where), attribution=where)
    assert [node.name for node in record.nodes] == [node.name for node in plain.nodes]
    assert any("triton" in node.name for node in record.nodes)


def test_a_chain_of_layers_is_one_record():
    target = reference_target("cuda", max_batch_size=4)
    mode = gk.ForwardMode.MULTI_LAYER_EAGLE
    with gk.MultiLayerEagleRunner(
        target.forwards[mode], spec=target.spec, sizes=target.sizes, batch_sizes=[4],
        device="cuda", attention=target.attention[mode], mutable_state=target.mutable_state,
    ) as runner:  # fmt: skip
        runner.capture(attribution=gk.Attribution(target.weights))
        batch = target.batch(mode, 4, 1)
        record = runner.inspect(4, replay=lambda: runner.replay(batch))
    assert share_in_modules(record) >= 0.99
    assert record.timing is not None
    assert len({edge.target for edge in record.edges}) == len(record.nodes) - 1
