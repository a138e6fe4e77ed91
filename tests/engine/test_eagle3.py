"""EAGLE-3: hidden states of three target layers, and a draft vocabulary of its own."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig

from engine_runs import chain_and_tree, outputs, run_all
from graphkit.engine import EagleDrafter, SamplingParams
from graphkit.engine.attention import SdpaAttention, TritonAttention
from graphkit.errors import ConfigError
from graphkit.models.heads.eagle import Eagle3Head
from graphkit.models.heads.load import head_sources
from small_llama import full_logits, small_llama
from small_targets import randomise, with_draft

NEW = 14
SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 16, "max_position_embeddings": 96, "vocab_size": 96,
}  # fmt: skip


@pytest.mark.slow
@chain_and_tree
@pytest.mark.parametrize("generation", ["v1", "v2", "v3"])
def test_the_order_of_the_draft_vocabulary_does_not_matter(
    make_engine, task, device, generation, topk
):
    """Every id of a draft is another one than in EAGLE, and the same drafts are accepted."""
    task, lengths = task.first(6), []
    order = torch.randperm(96, generator=torch.Generator().manual_seed(1)).to(device)
    options = {"topk": topk, "generation": generation, "batch_sizes": [8]}
    for engine in (
        make_engine("EAGLE", **options), make_engine("EAGLE3", token_map=order, **options),
    ):  # fmt: skip
        engine.capture()
        requests = run_all(engine, task.prompts, task.sampling())
        assert outputs(requests) == task.expected
        assert engine.stats.fallbacks == {}
        lengths.append([request.accept_length for request in requests])
    assert lengths[0] == lengths[1]
    assert sum(lengths[1]) / len(lengths[1]) > 1.5


def test_a_map_that_is_no_map_is_refused(make_engine, device):
    with pytest.raises(ConfigError, match=r"draft_token_map is \[40\] int32"):
        make_engine("EAGLE3", token_map=torch.arange(40, dtype=torch.int32, device=device))


@pytest.fixture(scope="module")
def models(device):
    """A random target of four layers, and a random head that drafts 60 of its 96 tokens."""
    target = small_llama(device=device, num_hidden_layers=4)
    head = Eagle3Head(
        LlamaConfig(num_hidden_layers=1, **SIZES), head_sources(target.model, target.layout),
        aux_layers=(1, 2, 4), draft_vocab_size=60,
    )  # fmt: skip
    tokens = torch.randperm(96, generator=torch.Generator().manual_seed(2))[:60].sort().values
    head.d2t.copy_(tokens - torch.arange(60))
    head.to(device)
    return with_draft(target, randomise(head, 0.3))


@pytest.fixture(scope="module")
def plain_texts(models, device):
    """Three prompts, and their greedy continuations without a cache."""
    generator = torch.Generator().manual_seed(7)
    prompts = [torch.randint(96, (n,), generator=generator).tolist() for n in (1, 9, 17)]
    texts = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device=device)
        for _ in range(NEW):
            ids = torch.cat([ids, full_logits(models, ids)[:, -1].argmax(-1)[:, None]], 1)
        texts.append(ids[0, len(prompt) :].tolist())
    return prompts, texts


@pytest.mark.slow
@chain_and_tree
@pytest.mark.parametrize(("generation", "page_size"), [("v1", 16), ("v2", 1), ("v3", 16)])
def test_a_head_with_a_reduced_vocabulary_is_lossless(
    models, plain_texts, device, generation, page_size, topk
):
    prompts, texts = plain_texts
    engine = models.engine(
        num_steps=3, topk=topk, page_size=page_size, max_batch_size=3, max_context_len=64,
        batch_sizes=[3], generation=generation,
        attention=TritonAttention if device == "cuda" else SdpaAttention,
    )  # fmt: skip
    with engine:
        eager = engine.generate(prompts, SamplingParams(max_new_tokens=NEW))
        engine.capture()
        captured = engine.generate(prompts, SamplingParams(max_new_tokens=NEW))
        assert engine.stats.replays
    assert outputs(eager) == texts
    assert outputs(captured) == texts
    assert [r.accept_length for r in captured] == [r.accept_length for r in eager]


def test_drafts_are_those_of_the_head_run_by_hand(models, plain_texts, device, monkeypatch):
    """The chain after a prompt: features of three layers, then the head's own hidden states."""
    (_, prompt, _), (_, text, _) = plain_texts
    target, head = models.original, models.draft.module
    ids = torch.tensor([*prompt, text[0]], device=device)
    features = features_by_hand(target, ids[:-1]) @ head.fc.weight.T
    tokens, hidden = ids[1:], features
    drafts = []
    for _ in range(3):
        made, logits = head_by_hand(head, target, tokens, hidden)
        best = int(logits.argmax())
        drafts.append(best + int(head.d2t[best]))
        tokens = torch.cat([tokens, tokens.new_tensor([drafts[-1]])])
        hidden = torch.cat([hidden, made[-1:]])
    kind = TritonAttention if device == "cuda" else SdpaAttention
    options = {"max_batch_size": 1, "max_context_len": 64, "batch_sizes": [1], "attention": kind}
    draft, seen = EagleDrafter.draft, []

    def spy(self, req_pool_indices, seq_lens, bonus_tokens):
        tree = draft(self, req_pool_indices, seq_lens, bonus_tokens)
        seen.append(tree.draft_tokens.tolist())
        return tree

    monkeypatch.setattr(EagleDrafter, "draft", spy)
    with models.engine(generation="v2", **options) as engine:
        engine.generate([prompt], SamplingParams(max_new_tokens=3))
    assert seen[0][1:] == drafts


def rotated(heads, theta=10000.0):
    """Rotate [T, heads, 16] at positions 0 to T - 1."""
    frequencies = theta ** (-torch.arange(8, device=heads.device) / 8)
    angles = torch.arange(len(heads), device=heads.device)[:, None, None] * frequencies
    pairs = torch.complex(heads[..., :8], heads[..., 8:]) * torch.exp(1j * angles)
    return torch.cat((pairs.real, pairs.imag), -1)


def norm_by_hand(x, norm):
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight


def layer_by_hand(state, prefix, attended, residual):
    """A decoder layer from the input of its attention, over all rows."""
    q, k, v, o = (state[f"{prefix}self_attn.{name}_proj.weight"] for name in "qkvo")
    query, key = (
        rotated((attended @ q.T).view(-1, 2, 16)),
        rotated((attended @ k.T).view(-1, 1, 16)),
    )
    scores = torch.einsum("qhd,khd->hqk", query, key.expand(-1, 2, -1)) / 4
    scores += torch.full_like(scores[0], -torch.inf).triu(1)
    mixed = torch.einsum("hqk,kd->qhd", scores.softmax(-1), attended @ v.T).flatten(1)
    hidden = residual + mixed @ o.T
    weight = state[f"{prefix}post_attention_layernorm.weight"]
    x = hidden / (hidden.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight
    gate, up, down = (state[f"{prefix}mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    return hidden + (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T


def features_by_hand(target, ids):
    """The residual streams after one, two and four layers, side by side."""
    state, streams = target.state_dict(), [target.model.embed_tokens.weight[ids]]
    for number, layer in enumerate(target.model.layers):
        normed = norm_by_hand(streams[-1], layer.input_layernorm)
        streams.append(layer_by_hand(state, f"model.layers.{number}.", normed, streams[-1]))
    return torch.cat([streams[1], streams[2], streams[4]], 1)


def head_by_hand(head, target, tokens, hidden):
    """Hidden states of all rows, and the logits of the last."""
    layer = head.midlayer
    embedded = norm_by_hand(target.model.embed_tokens.weight[tokens], layer.input_layernorm)
    both = torch.cat([embedded, norm_by_hand(hidden, layer.hidden_norm)], 1)
    made = layer_by_hand(head.state_dict(), "midlayer.", both, hidden)
    return made, norm_by_hand(made[-1], head.norm) @ head.lm_head.weight.T
