"""The models that ship with graphkit, with weights of eight and four bits."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import graphkit as gk
from graphkit.errors import ConfigError
from graphkit.models import reference_model
from graphkit.models.quantization.linear import QuantizedLinear
from graphkit.models.quantization.weight import QUANTIZATIONS
from graphkit.models.tokenizer import END_OF_TEXT, ByteTokenizer
from graphkit.ops.linear import project

PROMPT = "def replay(self, batch):"
TOKENS = 32
every_format = pytest.mark.parametrize("quantize", QUANTIZATIONS)


def text(model):
    """Return the tokens of the prompt, and the accept length."""
    with model.engine(max_batch_size=1, bos_token_id=END_OF_TEXT) as engine:
        engine.capture()
        ids = ByteTokenizer().encode(PROMPT)
        (request,) = engine.generate([ids], gk.SamplingParams(max_new_tokens=TOKENS))
        return request.output_ids, engine.stats.accept_length


def greedy(target, count):
    """Return the target's own tokens, from linear layers over its dequantised weights."""

    def plain(layer, rows, **result):
        weight = layer.quantized.dequantized(torch.float32)
        return project(rows, weight, layer.bias, **result)

    for layer in target.modules():
        if isinstance(layer, QuantizedLinear):
            layer.forward = plain.__get__(layer)
    ids = list(ByteTokenizer().encode(PROMPT))
    with torch.no_grad():
        for _ in range(count):
            ids.append(target(torch.tensor([ids])).logits[0, -1].argmax().item())
    return ids[-count:]


@pytest.mark.slow
@every_format
def test_drafted_text_is_that_of_the_dequantised_target(quantize):
    models = reference_model("EAGLE", device="cpu", quantize=quantize)
    assert isinstance(models.draft.module.layers[0].mlp.down_proj, QuantizedLinear)
    output, accept_length = text(models)
    assert accept_length > 1.5
    assert output == greedy(models.original, TOKENS)


@pytest.mark.slow
@every_format
@pytest.mark.parametrize(
    "algorithm", ["EAGLE3", "MULTI_LAYER_EAGLE", "STANDALONE", "DFLASH", "NGRAM"]
)
def test_every_algorithm_drafts_for_a_quantised_target(algorithm, quantize):
    without = reference_model("NONE", device="cpu", quantize=quantize)
    expected, one = text(without)
    output, accept_length = text(reference_model(algorithm, device="cpu", quantize=quantize))
    assert one == 1
    assert output == expected
    assert accept_length > 1


@every_format
def test_the_target_s_output_head_stays(quantize):
    models = reference_model("EAGLE", device="cpu", quantize=quantize)
    assert type(models.head) is nn.Linear  # the draft head's, too
    assert models.dtype == torch.float32


@every_format
def test_a_draft_head_is_quantised_as_a_whole(quantize):
    models = reference_model("EAGLE3", device="cpu", quantize=quantize)
    assert isinstance(models.draft.module.lm_head, QuantizedLinear)
    assert isinstance(models.draft.module.fc, QuantizedLinear)
    assert type(models.head) is nn.Linear


def test_unknown_formats_are_refused():
    with pytest.raises(ConfigError, match="expected 'fp8' or 'int4'"):
        reference_model("NONE", device="cpu", quantize="int3")
