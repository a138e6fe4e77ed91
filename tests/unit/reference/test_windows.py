"""An engine over a model whose layers have a sliding window decodes what the model does."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from graphkit.engine import SamplingParams
from graphkit.models.heads.config import LlamaConfig
from graphkit.models.heads.eagle import EagleHead
from graphkit.models.sharded import EngineModels, LlamaModel, engine_of, full_logits
from graphkit.models.sharded.engine import spec_of

PROMPTS = [[3, 4] * 8, [7]]
CONFIG = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=1, head_dim=16, max_position_embeddings=64,
    sliding_window=8,
)  # fmt: skip


@pytest.fixture(scope="module")
def target():
    torch.manual_seed(0)
    model = LlamaModel(CONFIG).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.3)
    return model


def decoded(model, prompt, count):
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(full_logits(model, torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("algorithm", ["NGRAM", "EAGLE"])
def test_the_engine_decodes_within_the_window(target, algorithm):
    head = None
    if algorithm == "EAGLE":
        head = EagleHead(replace(CONFIG, num_hidden_layers=1), target).eval()
    models = EngineModels(algorithm, target, head)
    with engine_of(
        models, spec_of(algorithm, topk=2 if head else 1), max_batch_size=2, max_context_len=64,
        batch_sizes=[2],
    ) as engine:  # fmt: skip
        engine.capture()
        made = engine.generate(PROMPTS, SamplingParams(max_new_tokens=12))
    expected = [decoded(target, prompt, 12) for prompt in PROMPTS]
    assert [request.output_ids for request in made] == expected
    full = LlamaModel(replace(CONFIG, sliding_window=None)).eval().requires_grad_(False)
    full.load_state_dict(target.state_dict())
    assert decoded(full, PROMPTS[0], 12) != expected[0], "the window matters"
