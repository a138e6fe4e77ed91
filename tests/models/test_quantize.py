"""Weights that ``models.load(quantize=)`` stores in fewer bits: text, fusion and what stays."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import nn

import graphkit as gk
from graphkit import ConfigError, TritonAttention, models
from graphkit.engine.kv import ReqToTokenPool
from graphkit.models import drafted_model, experts
from graphkit.models.fusion import linears
from graphkit.models.quantization import linear
from graphkit.models.quantization.linear import QuantizedLinear
from graphkit.models.quantization.weight import QUANTIZATIONS
from graphkit.ops.experts import expert_linear
from mtp_folders import save_with_mtp
from small_models import small_model

PROMPT = [5, 17, 3, 17, 3, 17, 9]
every_format = pytest.mark.parametrize("quantize", QUANTIZATIONS)


def dequantized(model):
    """Return a copy of a model of transformers with ``nn.Linear`` for its quantised layers."""
    copy = deepcopy(model)
    for owner in list(copy.modules()):
        for name, layer in list(owner.named_children()):
            if isinstance(layer, QuantizedLinear):
                plain = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None)
                plain.weight = nn.Parameter(layer.quantized.dequantized(torch.float32))
                if layer.bias is not None:
                    plain.bias = nn.Parameter(layer.bias.data)
                setattr(owner, name, plain)
    return copy


def generated(loaded, prompt=PROMPT, **options):
    """Return the tokens of a prompt from captured steps."""
    sizes = {"num_steps": 3, "max_batch_size": 2, "max_context_len": 64}
    with loaded.engine(generation="v3", **sizes | options) as engine:
        engine.capture()
        (request,) = engine.generate([prompt], gk.SamplingParams(max_new_tokens=8))
        assert all(not runner.stats.fallbacks for runner in engine.runners)
    return request.output_ids


UNMERGED = ("self_attn.o_proj", "mlp.down_proj")


def continued(model, prompt=PROMPT):
    """Return the tokens that a model of transformers continues a prompt by."""
    ids = torch.tensor([prompt])
    for _ in range(8):
        ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], 1)
    return ids[0, len(prompt) :].tolist()


@pytest.mark.slow
@every_format
@pytest.mark.parametrize("kind", ["llama", "qwen2", "phi3", "mixtral", "qwen3_next"])
def test_text_and_logits_are_those_of_the_dequantised_weights(kind, quantize):
    loaded = models.load(small_model(kind), quantize=quantize, device="cpu")
    plain = dequantized(loaded.original)
    ids = torch.tensor([PROMPT])
    torch.testing.assert_close(loaded.original(ids).logits, plain(ids).logits, rtol=1e-4, atol=1e-4)
    assert generated(loaded) == continued(plain)


@every_format
def test_merged_layers_are_fused_over_quantised_weights(quantize):
    loaded = models.load(small_model("llama"), quantize=quantize, device="cpu")
    plain = models.load(small_model("llama"), device="cpu")
    others = {f"model.layers.{layer}.{name}" for layer in (0, 1) for name in UNMERGED}
    replaced = plain.layout.replaced
    products = {name for name, text in replaced.items() if "graphkit::linear" in text}
    assert products == others | {"lm_head"}
    assert loaded.layout.replaced == {
        name: text for name, text in replaced.items() if name not in others
    }
    layer = loaded.model.model.layers[0]
    query, key = layer.self_attn.q_proj, layer.self_attn.k_proj
    for part in ("weight", "scale"):
        one, other = (each.get_parameter(part).untyped_storage() for each in (query, key))
        assert one.data_ptr() == other.data_ptr(), part
    assert type(loaded.head) is nn.Linear


def test_fewer_bytes_are_held():
    def nbytes(quantize):
        model = small_model("llama", hidden_size=256, head_dim=64, intermediate_size=512)
        loaded = models.load(model, quantize=quantize, dtype=torch.bfloat16, device="cpu")
        layers = loaded.model.model.layers
        return sum(each.untyped_storage().nbytes() for each in _storages(layers))

    whole, fp8, int4 = map(nbytes, (None, "fp8", "int4"))
    assert fp8 < 0.53 * whole
    assert int4 < 0.28 * whole


def _storages(module):
    return {each.untyped_storage().data_ptr(): each for each in module.parameters()}.values()


@pytest.mark.slow
@every_format
def test_a_draft_model_is_quantised_too(quantize):
    loaded = models.load(
        small_model("llama"), draft=small_model("llama"), quantize=quantize, device="cpu"
    )
    assert isinstance(loaded.draft.module.model.layers[0].mlp.up_proj, QuantizedLinear)
    assert generated(loaded) == continued(dequantized(loaded.original))


@pytest.mark.slow
@every_format
def test_mtp_layers_are_quantised_after_they_are_read(tmp_path, quantize):
    save_with_mtp(small_model("deepseek_v3"), tmp_path, template=1)
    loaded = models.load(tmp_path, draft="mtp", quantize=quantize, device="cpu")
    layer = loaded.draft.module.chain[0]
    assert isinstance(layer.decoder.layers[0].self_attn.o_proj, QuantizedLinear)
    assert type(layer.eh_proj) is nn.Linear
    assert generated(loaded) == continued(dequantized(loaded.original))


@pytest.mark.parametrize("kind", ["deepseek_v32", "mamba"])
def test_weights_that_the_model_reads_itself_are_not_quantised(kind):
    """DeepSeek-V3.2 reads the dtype of one, Mamba multiplies with one."""
    loaded = models.load(small_model(kind), quantize="fp8", device="cpu")
    plain = dequantized(loaded.original)
    ids = torch.tensor([PROMPT])
    torch.testing.assert_close(loaded.original(ids).logits, plain(ids).logits, rtol=1e-4, atol=1e-4)
    types = {n.rpartition(".")[2]: type(m) for n, m in loaded.original.named_modules()}
    assert types["weights_proj" if kind == "deepseek_v32" else "dt_proj"] is nn.Linear
    assert QuantizedLinear in types.values()


@pytest.mark.parametrize("row_invariant", [True, False])
@pytest.mark.parametrize(("device", "is_equal"), [("cpu", {True, False}), ("cuda", {True})])
def test_rows_are_equal_on_cuda_where_it_is_asked_for(row_invariant, device, is_equal, monkeypatch):
    """The log of a load names what takes its fastest way instead."""
    monkeypatch.setattr(drafted_model, "has_row_invariant_products", lambda *_: True)
    loaded = models.load(
        small_model("llama"), quantize="fp8", row_invariant=row_invariant, device="cpu", check=False
    )
    layers = [each for each in loaded.model.modules() if isinstance(each, QuantizedLinear)]
    assert {layer.row_invariant for layer in layers} == {row_invariant}
    requests, spec = ReqToTokenPool(2, 1, torch.device("cpu")), loaded.spec("NGRAM", num_steps=2)
    backend = loaded.engine_model(requests, spec, attention=TritonAttention).attention
    assert backend.is_row_invariant
    monkeypatch.setattr(drafted_model.DraftedModel, "device", torch.device(device))
    reasons = " ".join(loaded.row_dependences())
    assert ("fastest" not in reasons) == (row_invariant in is_equal)


@pytest.mark.parametrize("row_invariant", [False, True])
def test_a_row_invariant_model_does_not_attend_by_torch_on_a_cpu(row_invariant):
    loaded = models.load(small_model("llama"), row_invariant=row_invariant, device="cpu")
    assert bool(loaded.row_dependences()) == (not row_invariant)
    requests, spec = ReqToTokenPool(2, 1, torch.device("cpu")), loaded.spec("NGRAM", num_steps=2)
    assert loaded.engine_model(requests, spec).is_row_invariant == row_invariant
    assert loaded.engine_model(requests, spec, attention=TritonAttention).is_row_invariant


@pytest.mark.parametrize("row_invariant", [False, True])
@pytest.mark.parametrize("quantize", [None, "fp8"])
def test_experts_have_the_flag_of_the_load(quantize, row_invariant, monkeypatch):
    loaded = models.load(
        small_model("mixtral"), quantize=quantize, dtype=torch.bfloat16, device="cpu",
        row_invariant=row_invariant, check=False,
    )  # fmt: skip
    flags = []

    def noted(*args, row_invariant, **options):
        flags.append(row_invariant)
        return expert_linear(*args, row_invariant=row_invariant, **options)

    monkeypatch.setattr(experts, "expert_linear", noted)
    generated(loaded)
    assert set(flags) == {row_invariant}
    monkeypatch.setattr(drafted_model, "has_row_invariant_products", lambda *_: True)
    monkeypatch.setattr(drafted_model.DraftedModel, "device", torch.device("cuda"))
    assert bool(loaded.row_dependences()) == (not row_invariant)


@pytest.mark.slow
@pytest.mark.parametrize("row_invariant", [False, True])
def test_every_product_has_the_flag_of_the_load(row_invariant, monkeypatch, caplog):
    flags, op = set(), linear.quantized_linear
    with caplog.at_level("INFO", "graphkit.models.loader"):
        loaded = models.load(
            small_model("llama"), draft=small_model("llama"), quantize="int4", device="cpu",
            row_invariant=row_invariant, check=False,
        )  # fmt: skip
    (message,) = [each.message for each in caplog.records if "bits of a row" in each.message]
    assert ("the row alone" in message) == row_invariant

    def quantized_linear(*args, row_invariant, **options):
        flags.add(row_invariant)
        return op(*args, row_invariant=row_invariant, **options)

    monkeypatch.setattr(linear, "quantized_linear", quantized_linear)
    generated(loaded)
    assert flags == {row_invariant}


@pytest.mark.parametrize("row_invariant", [False, True])
def test_plain_products_have_the_flag_of_the_load_too(row_invariant, monkeypatch):
    loaded = models.load(
        small_model("llama"), device="cpu", row_invariant=row_invariant, check=False
    )
    flags, project = [], linear.project

    def noted(*args, row_invariant, **options):
        flags.append(row_invariant)
        return project(*args, row_invariant=row_invariant, **options)

    for module in (linear, linears):
        monkeypatch.setattr(module, "project", noted)
    generated(loaded)
    assert set(flags) == {row_invariant}


@pytest.mark.parametrize("quantize", ["fp4", 8])
def test_an_unknown_format_is_refused_before_the_folder_is_read(quantize):
    with pytest.raises(ConfigError, match="expected 'fp8' or 'int4'"):
        models.load("no folder", quantize=quantize)


def test_a_model_without_linear_layers_is_refused():
    with pytest.raises(ConfigError, match=r"no layers of torch\.nn\.Linear besides"):
        models.load(small_model("gpt2"), quantize="fp8", device="cpu")
