"""Draft models that are trained on the text of their target draft what it says."""

from __future__ import annotations

import pytest
import torch

import graphkit as gk
from graphkit import hf
from graphkit.reference import Eagle3Head, EagleHead, LlamaConfig, save_draft_head
from mtp_folders import save_with_mtp
from small_models import small_model
from trained_drafts import SENTENCES, head_run, head_target, mtp_run, train_head, trained

pytestmark = pytest.mark.slow
PROMPTS = [SENTENCES[i][: 4 + i].tolist() for i in range(3)]
NEW_TOKENS = 24


def with_head(kind, folder, create, layers=(), **options):
    target = trained(small_model(kind))
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=128,
    )  # fmt: skip
    head = create(config, head_target(target), **options)
    train_head(target, head.parameters(), head_run(head), layers)
    save_draft_head(head, folder)
    return hf.load(target, draft=folder, device="cpu")


def with_mtp(kind, folder):
    save_with_mtp(trained(small_model(kind)), folder, 1)
    loaded = hf.load(folder, draft="mtp", device="cpu")
    head = loaded.draft.module
    own = {name: each for name, each in head.named_parameters() if "embed_tokens" not in name}
    train_head(loaded.original, own.values(), mtp_run(head), ())
    return loaded


def standalone(_):
    target = trained(small_model("gemma3_text", tie_word_embeddings=False))
    draft = small_model(
        "gemma3_text", tie_word_embeddings=False, hidden_size=48, num_hidden_layers=1,
        layer_types=["sliding_attention"],
    )  # fmt: skip
    return hf.load(target, draft=trained(draft), device="cpu")


CASES = {
    "two gemma3_text": standalone,
    "EAGLE on olmo2": lambda folder: with_head("olmo2", folder, EagleHead),
    "EAGLE-3 on qwen3_moe": lambda folder: with_head(
        "qwen3_moe", folder, Eagle3Head, layers=(0, 1, 1), aux_layers=(0, 1, 1)
    ),
    "MTP of deepseek_v3": lambda folder: with_mtp("deepseek_v3", folder),
    "MTP of qwen3_5_text": lambda folder: with_mtp("qwen3_5_text", folder),
}


@pytest.mark.parametrize("case", CASES)
def test_a_trained_draft_model_is_accepted(case, tmp_path):
    loaded = CASES[case](tmp_path)
    for topk in (1, 2):
        with loaded.engine(
            topk=topk, max_batch_size=4, max_context_len=64, batch_sizes=[4]
        ) as engine:
            engine.capture()
            sampling = gk.SamplingParams(max_new_tokens=NEW_TOKENS)
            requests = engine.generate(PROMPTS, sampling)
            assert engine.stats.accept_length > 2  # of 4: three steps and the bonus token
        for prompt, request in zip(PROMPTS, requests, strict=True):
            ids = loaded.original.generate(
                torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, eos_token_id=None,
                pad_token_id=0, do_sample=False,
            )  # fmt: skip
            assert request.output_ids == ids[0, len(prompt) :].tolist()
