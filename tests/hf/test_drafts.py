"""Draft models of any target of transformers change nothing in its text, greedy or sampled."""

from __future__ import annotations

import pytest
import torch

import graphkit as gk
from graphkit import hf
from graphkit.errors import ConfigError
from graphkit.hf.draft_model import SharedModules
from graphkit.reference import Eagle3Head, EagleHead, LlamaConfig, save_draft_head
from small_models import small_model

pytestmark = pytest.mark.slow
PROMPTS = [[5, 17, 3, 17, 3, 17, 9, 5, 17], [7, 8, 9], list(range(30, 42))]
NEW_TOKENS = 14
SAMPLED = gk.SamplingParams(max_new_tokens=NEW_TOKENS, temperature=0.8, top_p=0.9, seed=3)


def two_gemmas():
    """A target, and a draft model of half its width and one layer."""
    target = small_model("gemma3_text", tie_word_embeddings=False)
    draft = small_model(
        "gemma3_text", tie_word_embeddings=False, hidden_size=32, num_hidden_layers=1,
        layer_types=["sliding_attention"],
    )  # fmt: skip
    return hf.load(target, draft=draft, device="cpu")


def head_config(model):
    """One layer of a Llama of the width of a target."""
    return LlamaConfig(
        vocab_size=model.config.vocab_size, hidden_size=model.config.hidden_size,
        intermediate_size=96, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        head_dim=16, max_position_embeddings=64,
    )  # fmt: skip


def with_head(kind, folder, create, **options):
    """A target whose head, with random weights, was saved in a folder."""
    other = hf.load(small_model(kind), device="cpu", check=False)
    torch.manual_seed(1)
    head = create(head_config(other.model), SharedModules(other.model, other.layout), **options)
    for weight in head.parameters():
        torch.nn.init.normal_(weight, std=0.15)
    if options:
        tokens = torch.randperm(128)[:96].sort().values
        head.d2t.copy_(tokens - torch.arange(96))
    save_draft_head(head, folder)
    return hf.load(small_model(kind), draft=folder, device="cpu")


CASES = {
    "standalone": ("STANDALONE", lambda _: two_gemmas()),
    "eagle": ("EAGLE", lambda folder: with_head("gemma2", folder, EagleHead)),
    "eagle-on-recurrent": ("EAGLE", lambda folder: with_head("qwen3_next", folder, EagleHead)),
    "eagle3": (
        "EAGLE3",
        lambda folder: with_head(
            "qwen3_moe", folder, Eagle3Head, aux_layers=(0, 1, 2), draft_vocab_size=96
        ),
    ),
}


@pytest.fixture(scope="module", params=CASES)
def loaded(request, tmp_path_factory):
    algorithm, create = CASES[request.param]
    loaded = create(tmp_path_factory.mktemp("draft"))
    assert loaded.algorithm == algorithm
    return loaded


def texts(loaded, sampling, **options):
    with loaded.engine(max_batch_size=4, max_context_len=64, batch_sizes=[4], **options) as engine:
        engine.capture()
        requests = engine.generate(PROMPTS, sampling)
        assert all(not runner.stats.fallbacks for runner in engine.runners)
        return [request.output_ids for request in requests]


@pytest.mark.parametrize("topk", [1, 2], ids=["chain", "tree"])
@pytest.mark.parametrize("generation", ["v1", "v2", "v3"])
def test_the_greedy_text_is_that_of_transformers(loaded, generation, topk):
    greedy = gk.SamplingParams(max_new_tokens=NEW_TOKENS)
    assert texts(loaded, greedy, generation=generation, topk=topk) == [
        loaded.original.generate(
            torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, eos_token_id=None, pad_token_id=0,
            do_sample=False,
        )[0, len(prompt) :].tolist()
        for prompt in PROMPTS
    ]  # fmt: skip


@pytest.mark.parametrize(("generation", "topk"), [("v1", 1), ("v2", 2), ("v3", 2)])
def test_a_seeded_text_is_that_of_plain_decoding(loaded, generation, topk):
    plain = texts(loaded, SAMPLED, algorithm="NONE")
    assert texts(loaded, SAMPLED, generation=generation, topk=topk) == plain


def test_every_mode_is_captured_and_audits_clean(loaded):
    target = loaded.target(max_batch_size=4, max_context_len=64, topk=2)
    assert gk.ForwardMode.DRAFT in target.modes
    report = gk.audit_target(target, batch_sizes=[4])
    assert [finding for finding in report.findings if finding.severity == "error"] == []


def test_a_draft_model_with_another_vocabulary_is_refused():
    with pytest.raises(ConfigError, match="vocabulary of 96 tokens, but LlamaForCausalLM has 128"):
        hf.load(small_model("llama"), draft=small_model("qwen3", vocab_size=96), device="cpu")


def test_a_recurrent_draft_model_is_refused():
    with pytest.raises(ConfigError, match="Qwen3NextForCausalLM has recurrent states"):
        hf.load(small_model("llama"), draft=small_model("qwen3_next"), device="cpu")


def test_an_algorithm_of_another_kind_is_refused():
    draft = small_model("llama", 1)
    with pytest.raises(ConfigError, match="Load one, or use one of STANDALONE, NGRAM, NONE"):
        hf.load(small_model("llama"), draft=draft, algorithm="EAGLE", device="cpu")
