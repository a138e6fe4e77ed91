"""Accept lengths of draft models that are trained on the text of their target."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from training.folders import save_draft_head
from transformers import LlamaConfig

import graphkit as gk
from accept_loops import accept_lengths, check_engine, head_drafts
from drafted_models import assistant, gemma4
from graphkit import models
from graphkit.models.heads.assistant import AssistantDraft
from graphkit.models.heads.eagle import Eagle3Head, EagleHead
from graphkit.models.heads.mtp import MtpHead
from graphkit.models.running import attending
from mtp_folders import save_with_mtp
from small_models import small_model
from trained_drafts import (
    SENTENCES,
    head_run,
    head_sources,
    mtp_run,
    train_assistant,
    train_head,
    trained,
)

pytestmark = pytest.mark.slow
PROMPTS = [SENTENCES[i][: 1 + 2 * i].tolist() for i in range(4)]
NEW_TOKENS, STEPS = 24, 3


def with_head(kind, folder, create, layers=(), **options):
    target = trained(small_model(kind))
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=128,
    )  # fmt: skip
    head = create(config, head_sources(target), **options)
    train_head(target, head.parameters(), head_run(head), layers)
    save_draft_head(head, folder)
    return models.load(target, draft=folder, device="cpu")


def with_mtp(kind, folder, count=1):
    save_with_mtp(trained(small_model(kind)), folder, 1, count)
    # Fused layers have no gradients.
    loaded = models.load(folder, draft="mtp", device="cpu", fuse=False)
    head = loaded.draft.module
    own = {name: each for name, each in head.named_parameters() if "embed_tokens" not in name}
    train_head(loaded.original, own.values(), mtp_run(head), ())
    first = head.chain[0]
    for layer in head.chain[1:]:  # as good as the first layer, with other tokens and states
        for name, weight in layer.named_parameters():
            weight.data.copy_(first.get_parameter(name))
    return loaded


def standalone(_):
    target = trained(small_model("gemma3_text", tie_word_embeddings=False))
    draft = small_model(
        "gemma3_text", tie_word_embeddings=False, hidden_size=48, num_hidden_layers=1,
        layer_types=["sliding_attention"],
    )  # fmt: skip
    loaded = models.load(target, draft=deepcopy(trained(draft)), device="cpu")
    loaded.plain_draft = draft
    return loaded


def with_assistant(_):
    target = trained(gemma4(hidden_size_per_layer_input=8))
    draft = train_assistant(target, assistant(use_ordered_embeddings=False))
    plain = deepcopy(draft)
    loaded = models.load(target, draft=draft, device="cpu")
    loaded.plain_draft = plain
    return loaded


CASES = {
    "two gemma3_text": standalone,
    "EAGLE on olmo2": lambda folder: with_head("olmo2", folder, EagleHead),
    "EAGLE-3 on qwen3_moe": lambda folder: with_head(
        "qwen3_moe", folder, Eagle3Head, layers=(0, 1, 1), aux_layers=(0, 1, 1)
    ),
    "MTP of deepseek_v3": lambda folder: with_mtp("deepseek_v3", folder),
    "MTP of qwen3_5_text": lambda folder: with_mtp("qwen3_5_text", folder),
    "assistant of Gemma 4": with_assistant,
    "three MTP layers of deepseek_v3": lambda folder: with_mtp("deepseek_v3", folder, 3),
}


def causal(call):
    """Attend to all earlier rows, without pools."""
    call = call.expanded()
    parts = call.query, call.key, call.value
    attended = scaled_dot_product_attention(
        *parts, is_causal=True, scale=call.scaling, enable_gqa=True
    )
    return attended.transpose(1, 2)


def loop(loaded, text):
    """Return what drafts after a part of a text, without a cache."""
    draft, layers = loaded.draft, loaded.draft.aux_layers
    states = loaded.original(torch.tensor([text]), output_hidden_states=True).hidden_states
    features = torch.cat([states[i][0] for i in layers], -1) if layers else states[-1][0]

    def by_model(text):
        for _ in range(STEPS):
            logits = loaded.plain_draft(torch.tensor([text]), use_cache=False).logits
            text = [*text, int(logits[0, -1].argmax())]
        return text[-STEPS:]

    def by_layers(text):
        length, hidden = len(text) - 1, features[: len(text) - 1]
        head, is_chain = draft.module, draft.algorithm == "MULTI_LAYER_EAGLE"
        for step in range(STEPS):
            ids, rows = torch.tensor(text[1 + step * is_chain :]), length + step * (not is_chain)
            with attending(causal, torch.arange(rows)):
                out = head(step * is_chain, ids, hidden, torch.arange(rows))
            text = [*text, int(head.logits(out[-1:])[0].argmax())]
            hidden = out if is_chain else torch.cat([hidden, out[-1:]])
        return text[-STEPS:]

    def by_assistant(text):
        length, original = len(text) - 1, loaded.original
        known = original(
            torch.tensor([text[:length]]), use_cache=False, output_hidden_states=True,
            return_shared_kv_states=True,
        )  # fmt: skip
        hidden = known.hidden_states[-1][:, -1:]
        for _ in range(STEPS):
            embedded = original.get_input_embeddings()(torch.tensor([text[-1:]]))
            out = loaded.plain_draft(
                inputs_embeds=torch.cat([embedded, hidden], -1),
                position_ids=torch.tensor([[length]]), shared_kv_states=known.shared_kv_states,
            )  # fmt: skip
            text, hidden = [*text, int(out.logits.argmax())], out.last_hidden_state
        return text[-STEPS:]

    if draft.algorithm == "STANDALONE":
        return by_model
    if isinstance(draft, AssistantDraft):
        return by_assistant
    if isinstance(draft.module, MtpHead):
        return by_layers
    return lambda text: head_drafts(draft.module, features, text, STEPS, draft.token_map)


@pytest.mark.parametrize("case", CASES)
def test_accept_lengths_are_those_of_a_loop_without_a_cache(case, tmp_path):
    loaded, expected = CASES[case](tmp_path), []
    options = {"max_batch_size": 4, "max_context_len": 64, "batch_sizes": [4]}
    # Behind a sentence many are as likely: transformers may choose another one by rounding.
    with loaded.engine(algorithm="NONE", **options) as engine:
        sampling = gk.SamplingParams(max_new_tokens=NEW_TOKENS + STEPS)
        texts = [[*r.prompt_ids, *r.output_ids] for r in engine.generate(PROMPTS, sampling)]
    for prompt, text in zip(PROMPTS, texts, strict=True):
        logits = loaded.original(torch.tensor([text])).logits[0, len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(text[len(prompt) :])[:, None])
        torch.testing.assert_close(chosen[:, 0], logits.amax(-1), atol=1e-3, rtol=0)
        expected.append(accept_lengths(loop(loaded, text), text, len(prompt), NEW_TOKENS))
    assert sum(map(sum, expected)) > 2 * sum(map(len, expected)), "most drafts are accepted"
    for generation, chunk in {"v1": 5, "v2": 512, "v3": 3}.items():
        with loaded.engine(
            num_steps=STEPS, generation=generation, chunked_prefill_size=chunk, **options
        ) as engine:
            engine.capture()
            check_engine(engine, PROMPTS, NEW_TOKENS, expected)
