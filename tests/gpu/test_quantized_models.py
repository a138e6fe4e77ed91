"""Quantised models on CUDA: text against their dequantised weights, captured."""

from __future__ import annotations

import pytest
import torch

import graphkit as gk
from graphkit.models.quantization.linear import QuantizedLinear
from graphkit.models.quantization.weight import QUANTIZATIONS
from graphkit.models.reference import reference_model
from graphkit.models.tokenizer import END_OF_TEXT, ByteTokenizer
from graphkit.ops.linear import project

pytestmark = pytest.mark.gpu
PROMPT = "def replay(self, batch):"
TOKENS = 64


@pytest.mark.parametrize("quantize", QUANTIZATIONS)
@pytest.mark.parametrize("generation", ["v1", "v3"])
def test_text_is_that_of_the_dequantised_weights_in_float32(quantize, generation):
    model = reference_model("EAGLE3", device="cuda", quantize=quantize)
    ids = list(ByteTokenizer().encode(PROMPT))
    options = {
        "num_steps": 3,
        "max_batch_size": 2,
        "generation": generation,
        "bos_token_id": END_OF_TEXT,
    }
    with model.engine(**options) as engine:
        engine.capture()
        (request,) = engine.generate([ids], gk.SamplingParams(max_new_tokens=TOKENS))
        assert engine.stats.accept_length > 1.5
        assert all(not runner.stats.fallbacks for runner in engine.runners)

    def plain(layer, rows, **result):
        weight = layer.quantized.dequantized(torch.float32)
        return project(rows, weight, layer.bias, **result)

    for layer in model.original.modules():
        if isinstance(layer, QuantizedLinear):
            layer.forward = plain.__get__(layer)
    whole = torch.tensor([ids + request.output_ids], device="cuda")
    with torch.no_grad():
        logits = model.original(whole).logits[0, len(ids) - 1 : -1]
    for place, token in enumerate(request.output_ids):
        best, second = logits[place].topk(2).values.tolist()
        is_tie = best - second < 1e-3 * abs(best)
        assert is_tie or token == logits[place].argmax().item(), (place, best, second)


@pytest.mark.parametrize("quantize", QUANTIZATIONS)
@pytest.mark.filterwarnings("ignore")
def test_a_model_of_transformers_is_checked_and_captured(quantize):
    pytest.importorskip("transformers")
    from graphkit import models
    from small_models import small_model

    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    model = models.load(
        small_model("llama", **sizes), quantize=quantize, dtype=torch.bfloat16, device="cuda"
    )
    with model.engine(max_batch_size=2, max_context_len=64) as engine:
        engine.capture()
        engine.generate([[5, 17, 3, 9]], gk.SamplingParams(max_new_tokens=8))
        assert all(not runner.stats.fallbacks for runner in engine.runners)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("awq", "llama"),
        ("gptq", "llama"),
        ("compressed int4", "llama"),
        ("fp8 blocks", "llama"),
        ("fbgemm", "llama"),
        ("modelopt", "llama"),
        ("fp8 blocks", "qwen3_moe"),
        ("awq", "qwen3_moe"),
        ("awq", "deepseek_v32"),  # reads the dtype of a weight
    ],
)
def test_folders_are_loaded_and_captured(tmp_path, name, kind):
    pytest.importorskip("transformers")
    from graphkit import models
    from quantized_folders import SIZES, write_quantized

    write_quantized(tmp_path, name, kind, sizes=SIZES if kind == "llama" else {})
    model = models.load(tmp_path, dtype=torch.bfloat16, device="cuda")
    with model.engine(max_batch_size=2, max_context_len=64) as engine:
        engine.capture()
        engine.generate([[5, 17, 3, 9]], gk.SamplingParams(max_new_tokens=8))
        assert all(not runner.stats.fallbacks for runner in engine.runners)
