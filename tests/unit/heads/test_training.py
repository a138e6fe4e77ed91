"""Training: unrolled drafts equal those of decoding, and losses match their definitions."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import Qwen3Config

from causal_attention import run_head
from graphkit import models
from graphkit.models.heads.dflash import DFlashHead
from graphkit.models.running import attending
from small_llama import full_logits
from small_targets import mtp_chain

STEPS = 3
TWO_LAYERS = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 128,
}  # fmt: skip


@pytest.fixture
def ids():
    return torch.randint(96, (2, 12), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def features(ids):
    return torch.randn(*ids.shape, 64, generator=torch.Generator().manual_seed(2))


class Cache:
    """An ``attend`` for one request that keeps each layer's keys and values between calls."""

    def __init__(self):
        self.kept = {}

    def __call__(self, layer, query, key, value):
        old = self.kept.get(layer, (key[:0], value[:0]))
        keys, values = self.kept[layer] = (torch.cat((old[0], key)), torch.cat((old[1], value)))
        mask = torch.ones(len(key), len(keys), dtype=torch.bool).tril(len(keys) - len(key))
        out = scaled_dot_product_attention(
            *(x.transpose(0, 1)[None] for x in (query, keys, values)), mask, enable_gqa=True
        )
        return out[0].transpose(0, 1)


class Context:
    """An ``attend`` for one block behind the keys and values of its context."""

    def __init__(self, layers):
        self.layers = layers

    def __call__(self, layer, query, *block):
        both = (torch.cat(rows) for rows in zip(self.layers[layer], block, strict=True))
        query, key, value = (x.transpose(0, 1)[None] for x in (query, *both))
        out = scaled_dot_product_attention(query, key, value, enable_gqa=True)
        return out[0].transpose(0, 1)


class Recorder:
    """A head that returns its input plus 1 and records its calls."""

    def __init__(self):
        self.calls = []

    def __call__(self, *arguments):
        *step, tokens, hidden, positions = arguments
        self.calls.append((*step, tokens, hidden, positions))
        return hidden + 1

    def logits(self, *arguments):
        return arguments[-1]


def test_every_root_is_fed_as_the_shift_says(training):
    """Token and feature of position p in window b are p + 100 b."""
    ids = torch.arange(10) + torch.tensor([[0], [100]])
    features = ids[..., None].float()
    roots = torch.arange(7).repeat(2)
    for unroll, position_step in ((training.unroll.eagle_drafts, 1),):
        head = Recorder()
        drafts = list(unroll(head, ids, features))
        assert len(drafts) == len(head.calls) == STEPS
        for k, (*step, tokens, hidden, positions) in enumerate(head.calls):
            assert step == ([] if position_step else [k])
            window = 100 * torch.arange(2).repeat_interleave(7)
            assert torch.equal(tokens, roots + window + k + 1)
            assert torch.equal(hidden[:, 0], (roots + window + k).float()), (
                "the last result after step 1"
            )
            assert torch.equal(positions, roots + position_step * k)
        assert all(draft.logits.shape == (2, 7, 1) for draft in drafts)


def test_eagle_drafts_are_those_of_decoding_with_a_cache(training, eagle, target, ids, features):
    for model in (target, eagle):
        model.double()  # steps without a norm between them magnify rounding
    features = features.double()
    drafts = list(training.unroll.eagle_drafts(eagle, ids, features))
    for window in range(2):
        for root in (0, 1, 5, 8):
            cache, hidden = Cache(), features[window, : root + 1]
            for step, draft in enumerate(drafts):
                rows = slice(root + step if step else 0, root + step + 1)
                positions = torch.arange(12)[rows]
                hidden = run_head(eagle, ids[window, 1:][rows], hidden, positions, cache)[-1:]
                torch.testing.assert_close(draft.hidden[window, root], hidden[0])
                torch.testing.assert_close(draft.logits[window, root], eagle.logits(hidden)[0])


def test_eagle3_drafts_are_those_of_decoding_with_a_cache(training, eagle3, target, ids):
    """The first row of a root projects the features; later rows take the head's own states."""
    for model in (target, eagle3):
        model.double()
    features = torch.randn(2, 12, 192, dtype=torch.float64)
    drafts = list(training.unroll.eagle3_drafts(eagle3, ids, features))
    assert all(draft.hidden is None for draft in drafts), "nothing ties them to the features"
    for window in range(2):
        for root in (0, 5, 8):
            cache, hidden = Cache(), features[window, : root + 1]
            for step, draft in enumerate(drafts):
                rows = slice(root + step if step else 0, root + step + 1)
                positions = torch.arange(12)[rows]
                hidden = run_head(eagle3, ids[window, 1:][rows], hidden, positions, cache)[-1:]
                torch.testing.assert_close(draft.logits[window, root], eagle3.logits(hidden)[0])
                assert torch.equal(draft.tokens, eagle3.token_map)


def test_dflash_drafts_are_those_of_a_block_behind_its_context(training, target, ids):
    """A block sees the context up to its root, and no other block."""
    torch.manual_seed(9)
    config = Qwen3Config(**TWO_LAYERS)
    head = DFlashHead(config, target, target_layer_ids=(0,), block_size=4, mask_token_id=90)
    for name, parameter in head.named_parameters():
        parameter.data.normal_(1.0 if "norm" in name else 0.0, 0.15)
    features = torch.randn(2, 12, 64)
    drafts = list(training.unroll.dflash_drafts(head, ids, features))
    assert [draft.logits.shape[:2] for draft in drafts] == [(2, 3)] * 3
    for window in range(2):
        for block, root in enumerate((0, 4, 8)):
            rows = torch.full((4,), 90)
            rows[0] = ids[window, root + 1]
            context = head.encoder(features[window, : root + 1])
            cache = Context(head.context_heads(context, torch.arange(root + 1)))
            logits = head.logits(run_head(head, rows, root + 1 + torch.arange(4), cache))
            for step, draft in enumerate(drafts, 1):
                torch.testing.assert_close(draft.logits[window, block], logits[step])


def test_rates_of_a_block_count_drafts_behind_right_ones(training, monkeypatch):
    """The target chooses the text. A block that begins wrong counts in the first step alone."""
    windows = torch.randint(95, (2, 13), generator=torch.Generator().manual_seed(3))
    choice = windows[:, 1:]
    logits = torch.nn.functional.one_hot(choice, 96).float()
    monkeypatch.setattr(training.losses, "target_features", lambda *_: (None, logits))

    def unroll(_head, _ids, _features):
        for step in (1, 2, 3):
            best = choice[:, step::4].clone()
            best[1] += step == 1
            best[0, 0] += step == 3
            drafted = torch.nn.functional.one_hot(best, 96).float()
            yield training.unroll.Draft(drafted, stride=4, reads_text=False)

    rates = training.losses.accept_rates(unroll, None, None, (windows,))
    assert rates == [0.5, 1.0, 0.6667]


def test_mtp_drafts_are_those_of_decoding_with_a_cache(training, llama, ids, features):
    head = mtp_chain(llama, 0.15, fuse=False).module.double()
    llama.original.double()
    features = features.double()
    drafts = list(training.unroll.mtp_drafts(head, ids, features))
    assert all(draft.hidden is None for draft in drafts)
    for window in range(2):
        hidden = features[window, :9]
        for i, draft in enumerate(drafts):
            tokens, cache, parts = ids[window, i + 1 : i + 10], Cache(), []

            def attend(call, cache=cache):
                rows = (x[0].transpose(0, 1) for x in (call.query, call.key, call.value))
                return cache(0, *rows)[None]

            for rows in (slice(0, 4), slice(4, 5), slice(5, 9)):
                positions = torch.arange(9)[rows]
                with attending(attend, positions):
                    parts.append(head(i, tokens[rows], hidden[rows], positions))
            hidden = torch.cat(parts)
            torch.testing.assert_close(draft.logits[window], head.logits(hidden))


def test_standalone_drafts_are_the_models_own_predictions(training, llama, ids):
    whole = full_logits(llama, ids[:, 1:])
    drafts = list(training.unroll.standalone_drafts(llama.original, ids, None))
    assert len(drafts) == STEPS
    for k, draft in enumerate(drafts):
        assert torch.equal(draft.logits, whole[:, k : k + 9])


def test_features_and_logits_are_the_targets(training, llama, ids):
    features, logits = training.losses.target_features(llama, ids)
    decoder = llama.original.get_decoder()
    torch.testing.assert_close(logits, full_logits(llama, ids))
    torch.testing.assert_close(llama.original.lm_head(features), logits)
    streams, same = training.losses.target_features(llama, ids, (2, 0))
    torch.testing.assert_close(decoder.norm(streams[..., :64]), features)
    torch.testing.assert_close(streams[..., 64:], decoder.embed_tokens(ids))
    assert torch.equal(same, logits)


class Oracle:
    """Draft steps that predict what the target does, shifted by ``late`` positions."""

    def __init__(self, training, target, *, late=0):
        self.late, self.make = late, training.losses.target_features
        self.target, self.draft = target, training.unroll.Draft

    def __call__(self, head, ids, features):
        _, logits = self.make(self.target, ids)
        for k in range(1, STEPS + 1):
            own = slice(k - self.late, ids.shape[1] - STEPS + k - self.late)
            yield self.draft(logits[:, own], features[:, own] + 1)


def test_draft_loss_of_a_perfect_head(training, llama, ids):
    """Cross entropy is the target's entropy; features are 1 off everywhere: smooth L1 of 0.5."""
    windows = torch.cat((ids, ids[:, :1]), 1)
    loss = training.losses.draft_loss(Oracle(training, llama), None, llama, windows)
    log_probs = full_logits(llama, ids).log_softmax(-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    expected = sum(entropy[:, k : k + 9].mean() for k in (1, 2, 3)) / 3 + 0.1 * 0.5
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    late = training.losses.draft_loss(Oracle(training, llama, late=1), None, llama, windows)
    assert late > loss + 0.1


def test_accept_rates_count_the_targets_choices(training, llama, ids):
    batches = torch.cat((ids, ids[:, :1]), 1).split(1)
    rates = training.losses.accept_rates(Oracle(training, llama), None, llama, batches)
    assert rates == [1.0, 1.0, 1.0]
    choice = full_logits(llama, ids).argmax(-1)
    expected = [
        (choice[:, k : k + 9] == choice[:, k - 1 : k + 8]).double().mean() for k in (1, 2, 3)
    ]
    late = Oracle(training, llama, late=1)
    rates = training.losses.accept_rates(late, None, llama, batches)
    assert rates == [round(rate.item(), 4) for rate in expected]


def reduced(draft, tokens):
    """The same draft over some tokens, in another order."""
    return draft._replace(logits=draft.logits[..., tokens], hidden=None, tokens=tokens)


def test_a_reduced_vocabulary_is_compared_in_the_targets(training, llama, ids):
    """The loss is over its tokens alone, and the best of them counts as the target's choice."""
    oracle, tokens = Oracle(training, llama), torch.arange(0, 96, 2).flip(0)

    def unroll(*given):
        return (reduced(draft, tokens) for draft in oracle(*given))

    logits = full_logits(llama, ids)
    rates = training.losses.accept_rates(unroll, None, llama, (torch.cat((ids, ids[:, :1]), 1),))
    is_even = logits.argmax(-1) % 2 == 0
    expected = [is_even[:, k : k + 9].double().mean().item() for k in (1, 2, 3)]
    assert rates == [round(rate, 4) for rate in expected]
    log_probs = logits[..., ::2].log_softmax(-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    expected = sum(entropy[:, k : k + 9].mean() for k in (1, 2, 3)) / 3
    loss = training.losses.draft_loss(unroll, None, llama, torch.cat((ids, ids[:, :1]), 1))
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)


def test_the_draft_vocabulary_is_the_most_frequent_bytes(training):
    recipe = training.recipes.RECIPES["eagle3"]
    target = plain_target(training)
    norm = target.original.get_decoder().norm
    norm.weight.data.normal_()
    corpus = torch.tensor([*range(256), *range(3, 256, 2)], dtype=torch.uint8)
    head = recipe.build(target, corpus)
    assert len(head.token_map) == recipe.draft_vocab_size == 128
    assert set(head.token_map.tolist()) >= set(range(3, 256, 2))
    assert head.token_map.tolist() == sorted(head.token_map.tolist())
    assert head.aux_layers == recipe.layers
    assert torch.equal(head.lm_head.weight, target.head.weight[head.token_map])
    assert torch.equal(head.norm.weight, norm.weight)


def plain_target(training):
    """The target of the recipes with new weights, whose distributions are no even ones."""
    model = training.recipes.RECIPES["target"].build(None, None)
    with torch.no_grad():
        model.lm_head.weight.mul_(5)
    return models.load(model, device="cpu", fuse=False, check=False)


def test_accept_length(training):
    assert training.losses.accept_length([0.5, 0.4, 0.25]) == pytest.approx(1.75)
    assert training.losses.accept_length([0.0, 1.0, 1.0]) == 1
    assert training.losses.accept_length([1.0, 1.0, 1.0]) == 4


@pytest.mark.parametrize("name", ["eagle", "eagle3", "mtp"])
def test_heads_learn_and_the_target_does_not(name, training):
    torch.manual_seed(0)
    recipe = training.recipes.RECIPES[name]
    target = plain_target(training)
    before = {key: tensor.clone() for key, tensor in target.original.state_dict().items()}
    head = recipe.build(target, torch.arange(256, dtype=torch.uint8))
    windows = torch.randint(256, (1, 33))
    first = recipe.loss(head, target, windows).item()
    weights = [weight for weight in head.parameters() if weight.requires_grad]
    training.loop.optimise(weights, lambda: recipe.loss(head, target, windows), 12, math.inf)
    assert recipe.loss(head, target, windows).item() < first - 0.1
    for key, tensor in target.original.state_dict().items():
        assert torch.equal(tensor, before[key]), key


def test_loss_and_bits_agree_with_their_definition(training):
    torch.manual_seed(0)
    model = training.recipes.RECIPES["target"].build(None, None)
    corpus = torch.randint(256, (3 * 512 + 1,), dtype=torch.uint8)
    windows = training.corpus.windows_at(corpus, torch.tensor([0, 512, 1024]))
    log_probs = model(windows[:, :-1]).logits.log_softmax(-1)
    nats = -log_probs.gather(-1, windows[:, 1:, None]).mean().item()
    losses = training.losses
    assert losses.next_token_loss(model, windows).item() == pytest.approx(nats, rel=1e-5)
    bits = losses.held_out_bits(model, training.corpus.all_windows(corpus, 2))
    assert bits == pytest.approx(nats / math.log(2), rel=1e-5)


def test_windows_are_runs_of_the_corpus_and_follow_the_seed(training):
    corpus = torch.arange(700).remainder(251).to(torch.uint8)
    draw = training.corpus.random_windows
    first, second = (next(draw(corpus, 64, seed)) for seed in (3, 4))
    assert first.shape == (64, 513)
    assert torch.equal((first[:, 1:] - first[:, :-1]) % 251, torch.ones(64, 512).long())
    assert torch.equal(first, next(draw(corpus, 64, 3)))
    assert not torch.equal(first, second)


def test_the_rate_rises_then_falls(training):
    rates = [training.loop.learning_rate(step / 100) for step in range(101)]
    assert rates[0] == 0
    assert max(rates) == pytest.approx(training.loop.PEAK_RATE)
    assert rates.index(max(rates)) == 3
    assert rates[3:] == sorted(rates[3:], reverse=True)
    assert rates[-1] == pytest.approx(training.loop.PEAK_RATE / 20)


def test_optimise_lowers_a_loss_and_heeds_the_limit(training):
    weight = torch.nn.Parameter(torch.ones(4))

    def next_loss():
        assert weight.grad is None, "gradients of the last step are gone"
        return weight.square().sum()

    optimise = training.loop.optimise
    assert optimise([weight], next_loss, 100, math.inf) == 100
    assert weight.abs().max().item() < 0.9
    assert optimise([weight], next_loss, 10**9, 0.05) < 10**9
