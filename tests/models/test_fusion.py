"""Modules of a loaded model run through graphkit's ops where both compute the same."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import weakref
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.llama import modeling_llama
from transformers.models.mixtral import modeling_mixtral

import graphkit as gk
from graphkit import models
from graphkit.audit.live_tensors import _storages
from graphkit.engine.attention import TritonAttention
from graphkit.errors import TargetError
from graphkit.models import pools
from graphkit.models.fusion import linears
from graphkit.models.fusion.norms import DeferredProduct
from graphkit.models.quantization.linear import set_row_invariant
from graphkit.models.residual import DeferredResidualAdd, DeferredSums, normalised
from graphkit.models.running import SelectedKeys, attending
from graphkit.models.tensor_parallel import RankSum
from small_models import small_model
from two_ops_attention import TwoOps

MODE = gk.ForwardMode.TARGET_VERIFY
DENSE_KINDS = ["llama", "mistral", "qwen2", "qwen3"]
MOST_NODES = 8
"""Of a dense layer: four products, two norms, rotation with the store, and attention."""


def verify_nodes(target):
    with target.runner(MODE, device="cpu", batch_sizes=[2]) as runner:
        runner.capture()
        return runner.inspect(2).nodes


@pytest.mark.slow
@pytest.mark.parametrize("kind", DENSE_KINDS)
def test_a_step_has_few_nodes_per_layer(kind, tmp_path, monkeypatch):
    # One op per layer, as on CUDA, so that the nodes of attention do not hide others.
    monkeypatch.setattr(pools, "SdpaAttention", TritonAttention)
    small_model(kind).save_pretrained(tmp_path)
    fused = verify_nodes(models.load(tmp_path, device="cpu").target(max_batch_size=2))
    per_layer = Counter(node.op for node in fused if "layers.1." in node.module)
    assert per_layer.total() <= MOST_NODES, per_layer
    plain = models.load(tmp_path, device="cpu", fuse=False)
    assert not plain.layout.replaced
    assert len(verify_nodes(plain.target(max_batch_size=2))) > 2 * len(fused)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*DENSE_KINDS, "gemma3_text"])
def test_heads_are_rotated_and_stored_by_one_op_per_layer(kind, tmp_path, monkeypatch):
    model = small_model(kind)
    model.save_pretrained(tmp_path)
    found = []
    for attention in (TritonAttention, TwoOps):
        monkeypatch.setattr(pools, "SdpaAttention", attention)
        target = models.load(tmp_path, device="cpu").target(max_batch_size=2)
        with target.runner(MODE, device="cpu", batch_sizes=[2]) as runner:
            runner.capture()
            ops = Counter(node.op for node in runner.inspect(2).nodes)
            logits = runner.run(runner.sample_batch(2)).next_token_logits
        found.append((ops, [logits, *target.mutable_state.values()]))
    (ops, results), (others, expected) = found
    layers = model.config.num_hidden_layers
    assert all(map(torch.equal, results, expected))
    assert others["graphkit::rotated_heads"] == others["graphkit::store_kv"] == layers
    assert ops["graphkit::store_rotated_heads"] == layers
    assert "graphkit::rotated_heads" not in ops
    assert "graphkit::store_kv" not in ops
    assert ops.total() <= others.total() - layers


def test_nodes_have_the_modules_of_the_checkpoint():
    model = small_model("llama")
    names = {name for name, _ in model.named_modules()}
    target = models.load(model, device="cpu").target(max_batch_size=2)
    with target.runner(MODE, device="cpu", batch_sizes=[2]) as runner:
        attribution = gk.Attribution(target.weights)
        runner.capture(attribution=attribution)
        nodes = runner.inspect(2).nodes
    modules = [node.module for node in nodes if node.module and not node.module.startswith("(")]
    assert set(modules) <= names
    layer = "model.layers.1"
    assert [name for name in modules if name.startswith(layer)] == [
        f"{layer}.input_layernorm",
        f"{layer}.self_attn.q_proj",
        *[f"{layer}.self_attn"] * (modules.count(f"{layer}.self_attn")),
        f"{layer}.self_attn.o_proj",
        f"{layer}.post_attention_layernorm",
        *[f"{layer}.mlp.gate_proj"] * modules.count(f"{layer}.mlp.gate_proj"),
        f"{layer}.mlp.down_proj",
    ]


def test_the_replaced_modules_are_named():
    replaced = models.load(small_model("qwen3"), device="cpu").layout.replaced
    layer = "model.layers.0"
    product = ", ".join(f"{layer}.self_attn.{part}_proj" for part in "qkv")
    assert replaced[f"{layer}.self_attn.k_proj"] == f"one product of {product}"
    assert replaced[f"{layer}.mlp"].startswith("graphkit::silu_and_mul")
    assert replaced[f"{layer}.self_attn"].startswith("graphkit::store_rotated_heads")
    assert replaced["model.norm"] == "graphkit::rms_norm"
    assert replaced[f"{layer}.self_attn.o_proj"] == "graphkit::linear"
    assert replaced["lm_head"] == "graphkit::linear"


def test_routers_are_row_invariant():
    layout = (loaded := models.load(small_model("mixtral"), device="cpu")).layout
    name = "model.layers.0.mlp.gate"
    assert layout.replaced[name] == "graphkit::linear and graphkit::choose_experts"
    assert not {*layout.replaced} & {*layout.torch_products}
    gate = loaded.model.get_submodule(name)
    rows = torch.randn(9, gate.weight.shape[1], generator=torch.Generator().manual_seed(0))
    whole = gate(rows)[0]
    for count in range(1, 9):
        assert torch.equal(gate(rows[:count])[0], whole[:count])


ROUTED = {
    "qwen3_moe": "mlp.gate", "gpt_oss": "mlp.router", "mixtral": "mlp.gate",
    "qwen3_next": "mlp.gate", "qwen2_moe": "mlp.gate",
    "deepseek_v2": "mlp.gate",  # multiplies in float32
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ROUTED)
def test_routers_and_shared_experts_give_their_own_results(kind, dtype):
    model = small_model(kind).to(dtype)
    rows = torch.randn(1, 7, model.config.hidden_size, generator=torch.Generator().manual_seed(0))
    layer = f"model.layers.{len(model.model.layers) - 1}"
    block = model.get_submodule(f"{layer}.mlp")
    with torch.no_grad():
        expected = [model.get_submodule(f"{layer}.{ROUTED[kind]}")(rows[0].to(dtype))]
        expected += [block(rows.to(dtype))]
    loaded = models.load(model, device="cpu", check=False)
    replaced = loaded.layout.replaced
    name = f"{layer}.{ROUTED[kind]}"
    assert replaced[name] == "graphkit::linear and graphkit::choose_experts"
    is_shared = hasattr(block, "shared_expert") or hasattr(block, "shared_experts")
    shared = "graphkit::expert_sum of its parts" if is_shared else None
    assert replaced.get(f"{layer}.mlp") == shared
    with torch.no_grad():
        got = [loaded.model.get_submodule(name)(rows[0].to(dtype))]
        got += [loaded.model.get_submodule(f"{layer}.mlp")(rows.to(dtype))]
    if dtype == torch.float32:  # in others, products of torch may round to other choices
        torch.testing.assert_close(got, expected)


def test_a_router_that_scales_its_factors_keeps_its_forward(monkeypatch):
    forward = modeling_mixtral.MixtralTopKRouter.forward

    def scaled(self, hidden_states):
        logits, factors, experts = forward(self, hidden_states)
        return logits, factors * 1.01, experts

    monkeypatch.setattr(modeling_mixtral.MixtralTopKRouter, "forward", scaled)
    replaced = models.load(small_model("mixtral"), device="cpu", check=False).layout.replaced
    assert replaced["model.layers.0.mlp.gate"] == "graphkit::linear within its forward"


@pytest.mark.parametrize(
    ("kind", "products"), [("llama", {}), ("lfm2_moe", {"conv1d"}), ("llama4_text", {"bmm"})]
)
def test_modules_that_multiply_by_torch_are_named(kind, products):
    layout = models.load(small_model(kind), device="cpu").layout
    assert {*layout.torch_products.values()} == {*products}


def test_merged_weights_are_held_once():
    model = small_model("llama")
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    held = sum(weight.nbytes for weight in before.values())
    loaded = models.load(model, device="cpu")
    for each in (loaded.model, loaded.original):
        weights = dict(each.named_parameters())
        storages = {weight.untyped_storage().data_ptr(): weight for weight in weights.values()}
        assert sum(each.untyped_storage().nbytes() for each in storages.values()) == held
        assert all(torch.equal(weights[name], weight) for name, weight in before.items())


@pytest.mark.parametrize("quantize", [None, "fp8", "int4"])
def test_merged_layers_share_the_memory_of_their_weights(quantize):
    loaded = models.load(small_model("qwen2"), quantize=quantize, device="cpu")
    held = [
        {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
        for tensors in (
            loaded.model.parameters(),
            [*loaded.model.parameters(), *loaded.original.parameters()],
        )
    ]
    assert sum(held[0].values()) == sum(each.nbytes for each in loaded.model.parameters())
    assert held[0] == held[1]


def merged_model(kind):
    """Return a loaded model, a module with merged layers, these layers and rows for them."""
    loaded = models.load(small_model(kind), device="cpu")
    module = loaded.model.model.layers[0].self_attn
    return loaded, [module.q_proj, module.k_proj, module.v_proj], torch.randn(1, 3, 64)


def run_forward(loaded):
    """Return logits of a forward without a graph."""
    target = loaded.target(max_batch_size=2)
    with target.runner(MODE, device="cpu", batch_sizes=[2]) as runner:
        return runner.fall_back(runner.sample_batch(2)).next_token_logits.clone()


def running():
    return attending(lambda call: None, torch.arange(3))


@pytest.mark.parametrize("within", [nullcontext, running])
def test_each_layer_reads_its_weight_when_it_runs(within):
    _, layers, rows = merged_model("llama")
    with within():
        layers[0](rows)
        layers[1].weight.zero_()
        assert not layers[1](rows).any()
        layers[0](rows)
        rows.zero_()
        assert not layers[2](rows).any()


def test_layers_of_one_forward_share_one_product_and_keep_nothing(monkeypatch):
    products = []
    project = linears.project

    def counted(*args, **kwargs):
        products.append(weakref.ref(result := project(*args, **kwargs)))
        return result

    monkeypatch.setattr(linears, "project", counted)
    _, layers, rows = merged_model("llama")
    products.clear()
    expected = [layer.weight @ rows[0].T for layer in layers]
    with running():
        columns = [layer(rows) for layer in layers]
        assert len(products) == 1
        for got, wanted in zip(columns, expected, strict=True):
            torch.testing.assert_close(got[0], wanted.T)
        del columns, got
        assert products[0]() is None
        layers[0](rows)  # the others do not run
        input_alive = weakref.ref(rows)
        del rows
    assert input_alive() is None
    assert products[1]() is None


def test_threads_do_not_share_products():
    _, layers, rows = merged_model("llama")
    expected, wrong = [layer(rows) for layer in layers], []

    def run():
        for _ in range(50):
            with running():
                got = [layer(rows) for layer in layers]
            wrong.extend(
                not torch.allclose(*pair, atol=1e-6) for pair in zip(got, expected, strict=True)
            )

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(wrong) == 3 * 50 * 3
    assert not any(wrong)


REPLACE_WEIGHTS = {
    "data": lambda model, new: [
        setattr(weight, "data", new[name].clone()) for name, weight in model.named_parameters()
    ],
    "assign": lambda model, new: model.load_state_dict(
        {name: weight.clone() for name, weight in new.items()}, assign=True
    ),
    "copy": lambda model, new: model.load_state_dict(new),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "qwen3_next", "mamba2", "deepseek_v3"])
@pytest.mark.parametrize("replace", REPLACE_WEIGHTS)
@pytest.mark.filterwarnings("ignore:linear layers that run as one product")
def test_replaced_weights_count(kind, replace):
    other = small_model(kind)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in other.parameters():
            weight.add_(0.2 * torch.randn(weight.shape, generator=generator))
    new = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    expected = run_forward(models.load(other, device="cpu"))
    loaded = models.load(small_model(kind), device="cpu")
    before = run_forward(loaded)
    REPLACE_WEIGHTS[replace](loaded.model, new)
    torch.testing.assert_close(run_forward(loaded), expected)
    assert not torch.allclose(before, expected)


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "qwen3_next"])
def test_a_captured_graph_reads_the_weights_of_its_replay(kind):
    target = models.load(small_model(kind), device="cpu").target(max_batch_size=2)
    with target.runner(gk.ForwardMode.TARGET_VERIFY, batch_sizes=[2], device="cpu") as runner:
        runner.capture()
        batch = runner.sample_batch(2)
        before = runner.replay(batch).next_token_logits.clone()
        for weight in target.weights.parameters():
            weight.mul_(1.25).add_(0.01)
        logits = runner.replay(batch).next_token_logits.clone()
        assert torch.equal(logits, runner.fall_back(batch).next_token_logits)
        assert not torch.equal(before, logits)


def test_weights_that_were_replaced_are_named_as_slow():
    _, layers, rows = merged_model("llama")
    layers[1].weight.data = layers[1].weight.data.clone()
    with running(), pytest.warns(UserWarning, match="write new weights into the old ones"):
        layers[0](rows)


def test_engines_of_one_model_run_in_threads():
    """Without graphs: hooks of one forward must not record the rows of the other."""
    loaded = models.load(small_model("llama"), device="cpu")
    prompts = [[5, 17, 3], [9, 4, 88, 23, 54, 6, 1, 12]]

    def text(prompt):
        with loaded.engine(max_batch_size=2, max_context_len=64, generation="v1") as engine:
            return engine.generate([prompt], gk.SamplingParams(max_new_tokens=12))[0].output_ids

    expected = [text(prompt) for prompt in prompts]
    with ThreadPoolExecutor(2) as pool:
        for _ in range(3):
            assert list(pool.map(text, prompts)) == expected


def clamped_gate(self, x):
    return self.down_proj((self.act_fn(self.gate_proj(x)) * self.up_proj(x)).clamp(-9, 9))


def centred_norm(self, hidden_states):
    centred = hidden_states - hidden_states.mean(-1, keepdim=True)
    variance = centred.pow(2).mean(-1, keepdim=True)
    return self.weight * centred * torch.rsqrt(variance + self.variance_epsilon)


def norm_of_other_eps(self, hidden_states):
    variance = hidden_states.pow(2).mean(-1, keepdim=True)
    return self.weight * hidden_states * torch.rsqrt(variance + 10 * self.variance_epsilon)


def rotated_backwards(q, k, cos, sin, unsqueeze_dim=1):
    return ROTATE(q, k, cos, -sin, unsqueeze_dim)


ROTATE = modeling_llama.apply_rotary_pos_emb


@pytest.mark.parametrize(
    ("owner", "name", "function", "module"),
    [
        (modeling_llama.LlamaMLP, "forward", clamped_gate, "layers.0.mlp"),
        (modeling_llama.LlamaRMSNorm, "forward", centred_norm, "norm"),
        (modeling_llama.LlamaRMSNorm, "forward", norm_of_other_eps, "norm"),
        (modeling_llama, "apply_rotary_pos_emb", rotated_backwards, "layers.0.self_attn"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_module_that_computes_something_else_stays(monkeypatch, owner, name, function, module):
    monkeypatch.setattr(owner, name, function)
    loaded = models.load(small_model("llama"), device="cpu")  # compares the logits
    assert f"model.{module}" not in loaded.layout.replaced
    assert loaded.layout.replaced


YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("kind", "changes"),
    [("llama", {}), ("gpt_oss", {}), ("qwen3_next", {"partial_rotary_factor": 0.5})],
)
def test_scaled_rotations_are_fused(kind, changes, dtype):
    scaled = small_model(kind, rope_parameters=YARN | changes).to(dtype)
    loaded = models.load(scaled, device="cpu")  # compares the logits
    fused = "graphkit::store_rotated_heads before attention"
    names = [name for name, text in loaded.layout.replaced.items() if text == fused]
    heads = loaded.model.get_submodule(names[0]).forward
    assert heads.factor == pytest.approx(1.2079, abs=1e-4)
    assert bool(heads.rotated) == bool(changes)


def test_scaled_angles_that_no_module_tells_stay_with_the_model(monkeypatch):
    rotate = modeling_llama.LlamaRotaryEmbedding.forward
    monkeypatch.setattr(
        modeling_llama.LlamaRotaryEmbedding, "forward",
        lambda *args, **kwargs: tuple(1.1 * part for part in rotate(*args, **kwargs)),
    )  # fmt: skip
    replaced = models.load(small_model("llama"), device="cpu").layout.replaced
    assert "model.layers.0.self_attn" not in replaced
    assert "model.rotary_emb" not in replaced
    assert "model.layers.0.self_attn.q_proj" in replaced


@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_5_text", "phi3"])
def test_heads_with_gates_or_of_which_a_part_is_rotated_are_fused(kind):
    changes = {"partial_rotary_factor": 0.5} if kind == "phi3" else {}
    loaded = models.load(small_model(kind, **changes), device="cpu")
    fused = "graphkit::store_rotated_heads before attention"
    names = [name for name, text in loaded.layout.replaced.items() if text == fused]
    assert names
    heads = loaded.model.get_submodule(names[0]).forward
    assert 0 < heads.rotated < 2 * len(heads.frequencies)
    assert heads.gated is (kind != "phi3")


def test_attention_over_selected_keys_stays(monkeypatch):
    forward = modeling_llama.LlamaAttention.forward
    selected = SelectedKeys(torch.zeros(6, 1, dtype=torch.int64))

    def selecting(self, *args, **kwargs):
        return forward(self, *args, indices=selected, **kwargs)

    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", selecting)
    replaced = models.load(small_model("llama"), device="cpu", check=False).layout.replaced
    assert "model.layers.0.self_attn" not in replaced
    assert "model.layers.0.self_attn.q_proj" in replaced


def test_tied_layers_are_not_merged():
    model = small_model("llama")
    first, second = model.model.layers
    second.self_attn.q_proj.weight = first.self_attn.q_proj.weight
    loaded = models.load(model, device="cpu")
    name = "model.layers.0.self_attn.q_proj"
    assert loaded.layout.replaced[name] == "graphkit::linear within its forward"
    weights = [layer.self_attn.q_proj.weight for layer in loaded.model.model.layers]
    assert weights[0].data_ptr() == weights[1].data_ptr()


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "qwen3_next", "gpt_oss"])
def test_models_in_bfloat16_are_fused(kind):
    loaded = models.load(small_model(kind).to(torch.bfloat16), device="cpu")
    assert any(text == "graphkit::rms_norm" for text in loaded.layout.replaced.values())
    assert any(text.startswith("one product") for text in loaded.layout.replaced.values())


def test_norms_add_the_parts_of_products_that_reach_the_residual_stream_unchanged():
    def deferred(kind):
        model = models.load(small_model(kind), device="cpu").model
        layers = dict(model.named_modules())
        return {
            name.rpartition(".")[2]
            for name, layer in layers.items()
            if isinstance(vars(layer).get("forward"), DeferredProduct)
        }

    assert deferred("llama") == {"o_proj", "down_proj"}
    assert not deferred("granite")  # multiplies them by a number before


class TestDeferredResidualAdd:
    terms = torch.arange(12.0).view(1, 3, 4), torch.full((1, 3, 4), 0.5)

    def sum(self):
        with DeferredSums({4}):
            found = self.terms[0] + self.terms[1]
        assert isinstance(found, DeferredResidualAdd)
        return found

    @pytest.mark.parametrize(
        "read",
        [
            lambda rows: rows * 2, lambda rows: rows[0, 1:], lambda rows: torch.cat([rows, rows]),
            lambda rows: rows.float().mean(-1), lambda rows: rows.to(torch.bfloat16),
            lambda rows: nn.functional.linear(rows, torch.ones(2, 4)), lambda rows: rows + rows,
            lambda rows: rows.clone().tolist(), lambda rows: torch.stack((rows, rows)).sum(),
        ],
    )  # fmt: skip
    def test_every_operation_reads_the_sum(self, read):
        got, expected = read(self.sum()), read(self.terms[0] + self.terms[1])
        assert type(got) is type(expected)
        assert torch.equal(torch.as_tensor(got), torch.as_tensor(expected))

    def test_a_product_in_parts_is_added_by_the_norm(self):
        parts, (residual, _) = torch.randn(2, 1, 3, 4), self.terms
        expected = residual + parts.sum(0)
        weight = torch.ones(4)
        for swap in (False, True):
            product = DeferredResidualAdd(parts, torch.float32)
            with DeferredSums({4}):
                found = product + residual if swap else residual + product
            assert product.is_unread_product
            assert found._total is None
            assert torch.equal(normalised(found, weight, 0.0), normalised(expected, weight, 0.0))
            assert torch.equal(found.total(), expected)
        alone = DeferredResidualAdd(parts, torch.float32)
        assert torch.equal(normalised(alone, weight, 0.0), normalised(parts.sum(0), weight, 0.0))
        assert not alone.is_unread_product

    @pytest.mark.parametrize("row_invariant", [False, True])
    def test_norms_behind_sums_of_ranks_are_their_own_if_rows_must_not_depend(self, row_invariant):
        """A kernel that sums and normalises few rows adds squares in another order."""

        class Doubling:
            def all_reduce(self, rows):
                return rows * 2

            def takes_parts(self, *_):
                return False

            def add_rms_norm(self, rows, *_):
                return torch.zeros_like(rows), rows

        layer, weight = nn.Linear(4, 4), torch.ones(4)
        set_row_invariant(layer, row_invariant)
        summed = RankSum(SimpleNamespace(collectives=Doubling(), rank=0, size=2))
        parts, (residual, _) = torch.randn(2, 1, 3, 4), self.terms
        product = summed(layer, (), DeferredResidualAdd(parts, torch.float32))
        with DeferredSums({4}):
            rows = normalised(residual + product, weight, 0.0)
        expected = normalised(residual + 2 * parts.sum(0), weight, 0.0)
        assert torch.equal(rows, expected) == row_invariant

    @pytest.mark.parametrize("norm_dtype", [torch.bfloat16, torch.float32], ids=str)
    @pytest.mark.parametrize("in_parts", [False, True])
    def test_a_stream_of_float32_is_rounded_for_the_norm(self, in_parts, norm_dtype):
        """As in Mamba: the norm reads the rounded sum, and the stream keeps it in float32."""
        parts, stream = torch.randn(2, 1, 3, 4), torch.randn(1, 3, 4)
        rows, weight = parts.sum(0).bfloat16(), torch.ones(4, dtype=norm_dtype)
        expected = stream + rows
        for swap in (False, True):
            product = DeferredResidualAdd(parts, torch.bfloat16) if in_parts else rows
            with DeferredSums({4}):
                found = product + stream if swap else stream + product
                rounded = found.to(torch.bfloat16)
                assert isinstance(rounded, DeferredResidualAdd)
                got = normalised(rounded, weight, 0.0)
                assert found._total is not None
                assert torch.equal(found.to(torch.float32), expected)
            assert found.dtype == torch.float32
            assert torch.equal(got, normalised(expected.bfloat16(), weight, 0.0))
            with DeferredSums({4}):
                again = stream + rows
                assert torch.equal(
                    normalised(again, weight, 0.0), normalised(expected, weight, 0.0)
                )
                assert torch.equal(again.to(torch.bfloat16), expected.bfloat16())

    def test_metadata_does_not_compute_it(self):
        rows = self.sum()
        assert (rows.shape, rows.dtype, rows.dim(), len(rows)) == ((1, 3, 4), torch.float32, 3, 1)
        assert rows._total is None

    def test_a_norm_computes_it_once(self):
        rows = self.sum()
        total = self.terms[0] + self.terms[1]
        weight = torch.tensor([1.0, 2.0, 3.0, 4.0])
        assert torch.equal(normalised(rows, weight, 1e-6), normalised(total, weight, 1e-6))
        kept = rows._total
        assert torch.equal(rows.total(), total)
        assert rows.total() is kept

    def test_other_sums_are_computed_at_once(self):
        one, other = self.terms
        with DeferredSums({4}):
            for found in (one + 1, one + other[:, :1], one[0] + other[0], torch.add(one, 2)):
                assert type(found) is torch.Tensor
            assert type(one.transpose(1, 2) + other.transpose(1, 2)) is torch.Tensor

    def test_audits_pass_over_sums_without_memory(self):
        rows = self.sum()
        with torch._C.DisableTorchFunctionSubclass():
            assert list(_storages([rows, self.terms[0]])) == list(_storages([self.terms[0]]))
        assert rows._total is None

    def test_a_term_that_is_written_later_is_refused(self):
        one, other = (term.clone() for term in self.terms)
        with DeferredSums({4}):
            found = one + other
        one.zero_()
        with pytest.raises(TargetError, match="fuse=False"):
            found * 2


MEASURED_LOAD = """
import gc, sys, threading
from pathlib import Path
from graphkit import models
from small_models import small_model

def memory(kind):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(kind))

def watch():
    while not loaded.wait(0.002):
        peaks.append(memory(kind))

kind, folder = sys.argv[1:]
models.load(small_model("llama"), device="cpu")  # imports what loading imports
gc.collect()
before, peaks, loaded = memory(kind), [], threading.Event()
thread = threading.Thread(target=watch)
thread.start()
model = models.load(folder, device="cpu").model
loaded.set()
thread.join()
weights = sum(weight.nbytes for weight in model.parameters())
print((max(peaks) - before) / weights)
"""


def memory_of_a_load(kind, folder):
    """Return the most memory of a kind of ``/proc/self/status``, over that of the weights."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", MEASURED_LOAD, kind, str(folder)],
        env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return float(done.stdout)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("vocab_size", [256, 32_000])
def test_loading_takes_the_memory_of_the_weights(vocab_size, tmp_path):
    config = LlamaConfig(
        vocab_size=vocab_size, hidden_size=1024, intermediate_size=4096, num_hidden_layers=8,
        num_attention_heads=16, num_key_value_heads=4, tie_word_embeddings=vocab_size > 256,
    )  # fmt: skip
    # 490 or 620 MB: what a process allocates besides, about 50 MB, is little of that.
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    assert memory_of_a_load("VmRSS", tmp_path) <= 1.2


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_loading_experts_takes_the_memory_of_the_weights_beside_their_files(tmp_path):
    config = Qwen3MoeConfig(
        vocab_size=256, hidden_size=1024, moe_intermediate_size=1024, num_experts=32,
        num_hidden_layers=6, num_attention_heads=8, num_key_value_heads=2, head_dim=128,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path)  # 1.2 GB
    assert memory_of_a_load("RssAnon", tmp_path) <= 1.2
