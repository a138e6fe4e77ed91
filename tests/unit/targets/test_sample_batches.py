"""Sample batches of the reference target are like an engine's.

Forwards that read prefixes from KV pools agree with the models over whole texts.
"""

from __future__ import annotations

import numpy as np
import torch

import graphkit as gk
from graphkit.models.heads.layers import causal_attend
from graphkit.models.reference import LlamaModel
from graphkit.models.reference.target import model_target
from graphkit.ops.logits import top_candidates

VERIFY, DECODE = gk.ForwardMode.TARGET_VERIFY, gk.ForwardMode.DECODE
DRAFT, EXTEND = gk.ForwardMode.DRAFT, gk.ForwardMode.DRAFT_EXTEND
EXTEND_V2, LAYERS = gk.ForwardMode.DRAFT_EXTEND_V2, gk.ForwardMode.MULTI_LAYER_EAGLE
COUNT, STEPS = 6, 3


def whole(module, ids, *given):
    """Run a model over a whole text, without a cache."""
    ids = torch.as_tensor(ids)
    places = torch.arange(len(ids))
    attend = causal_attend(1, len(ids))
    if isinstance(module, LlamaModel):
        return module(ids, places, attend)
    *layer, hidden = given
    return module(*layer, ids, hidden, places, attend)


def assert_near(got, expected):
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_decode_continues_the_text(models, sample):
    _, output, requests = sample(DECODE)
    for logits, (text, length) in zip(output["next_token_logits"], requests, strict=True):
        hidden = whole(models[0], text[: length + 1])
        assert_near(logits, models[0].logits(hidden[-1]))


def test_verify_scores_the_drafts_behind_the_root(models, target, sample):
    batch, output, requests = sample(VERIFY)
    width = target.spec.num_draft_tokens
    hidden_states = output["hidden_states"].unflatten(0, (COUNT, width))
    drafts = batch.input_ids.reshape(COUNT, width)
    for row, (text, length) in enumerate(requests):
        assert drafts[row, 0] == text[length], "the root is the target's own"
        seen = whole(models[0], np.concatenate([text[:length], drafts[row]]))[length:]
        rows = slice(None) if target.spec.topk == 1 else 0
        assert_near(hidden_states[row, rows], seen[rows])
    expected = np.stack([text[length : length + width] for text, length in requests])
    wrong = (drafts != expected)[:, 1:].mean()
    assert 0.2 < wrong < 0.8, "about half of the drafts"


def test_a_draft_begins_where_the_last_extend_ended(models, target, sample):
    model, eagle, _ = models
    batch, output, requests = sample(DRAFT)
    for row, (text, length) in enumerate(requests):
        hidden = whole(eagle, text[1 : length + 1], whole(model, text[:length]))[-1]
        topk_p, topk_index = top_candidates(eagle.logits(hidden[None]), target.spec.topk)
        assert_near(batch.hidden_states[row], hidden)
        assert_near(torch.as_tensor(batch.topk_p[row]), topk_p[0])
        assert batch.topk_index[row].tolist() == topk_index[0].tolist()
    assert output["draft_tokens"].shape == (COUNT, target.spec.num_draft_tokens - 1)


def test_a_chain_is_drafted_token_by_token(models, sample):
    model, eagle, _ = models
    chain = model_target(*models, name="chain", topk=1, max_batch_size=COUNT)
    _, output, requests = sample(DRAFT, chain)
    for row, (text, length) in enumerate(requests):
        ids, features = list(text[1 : length + 1]), whole(model, text[:length])
        drafted = []
        for _ in range(STEPS):
            hidden = whole(eagle, ids, features)
            drafted.append(int(eagle.logits(hidden[-1]).argmax()))
            ids, features = [*ids, drafted[-1]], torch.cat([features, hidden[-1:]])
        assert output["draft_tokens"][row].tolist() == drafted


def test_extend_catches_up_on_the_accepted_tokens(models, sample):
    model, eagle, _ = models
    batch, output, requests = sample(EXTEND)
    ends = batch.num_accepted_tokens.cumsum()
    for row, (text, length) in enumerate(requests):
        new_length = length + batch.num_accepted_tokens[row]
        assert batch.seq_lens[row] == new_length
        hidden = whole(eagle, text[1 : new_length + 1], whole(model, text[:new_length]))
        assert_near(output["hidden_states"][row], hidden[-1])
        mine = batch.input_ids[ends[row] - batch.num_accepted_tokens[row] : ends[row]]
        assert mine.tolist() == text[length + 1 : new_length + 1].tolist()


def test_extend_v2_computes_the_same_accepted_rows(models, target, sample):
    model, eagle, _ = models
    batch, output, requests = sample(EXTEND_V2)
    width = target.spec.num_draft_tokens
    hidden_states = output["hidden_states"].unflatten(0, (COUNT, width))
    for row, (text, length) in enumerate(requests):
        assert batch.seq_lens[row] == length + width
        new_length = length + batch.num_accepted_tokens[row]
        hidden = whole(eagle, text[1 : new_length + 1], whole(model, text[:new_length]))
        assert_near(hidden_states[row, : new_length - length], hidden[length:])


def test_layers_predict_one_after_the_other(models, sample):
    model, _, mtp = models
    batch, output, requests = sample(LAYERS)
    for row, (text, length) in enumerate(requests):
        new_length = length + batch.num_accepted_tokens[row]
        ids, hidden = text[1 : new_length + 1].tolist(), whole(model, text[:new_length])
        for layer in range(STEPS):
            hidden = whole(mtp, ids, layer, hidden)
            (logits,) = mtp.logits(layer, hidden[-1:])
            assert_near(output["next_token_logits"][row, layer], logits)
            ids = [*ids[1:], int(logits.argmax())]
