"""Tokens of requests with a temperature follow the target's distribution.

The target is a Markov chain: a Llama whose attention adds nothing. Every token of a long text is a
draw that depends on the previous token only, so that one text samples the whole distribution.
"""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch

from engine_runs import chain_and_tree, each_generation, finish, outputs, run_all
from graphkit.engine import SamplingParams
from graphkit.engine.step.acceptance import sample_tokens
from graphkit.engine.step.processors import TargetLogits
from graphkit.engine.step.request_state import RequestState
from graphkit.ops.target_probs import target_probs
from small_llama import full_logits, small_llama

VOCAB, TEMPERATURES = 6, (0.6, 2.0)


@pytest.fixture(scope="module")
def markov(device):
    """The tiny target with a vocabulary of 6 tokens and without attention."""
    chain = small_llama(seed=13, vocab_size=VOCAB, device=device)
    for name, parameter in chain.model.named_parameters():
        if "o_proj" in name:
            parameter.data.zero_()
    chain.head.weight.data.mul_(0.5)  # every token is drawn often enough
    return chain


@pytest.fixture(scope="module")
def logits(markov, device):
    """After each token, [V, V]."""
    tokens = torch.arange(VOCAB, device=device)[:, None]
    return full_logits(markov, tokens)[:, 0].cpu()


@pytest.fixture
def engine_of(make_engine, markov):
    """Engines over the Markov chain."""
    made = type(make_engine)(markov, make_engine.device)
    return lambda **options: made(max_batch_size=32, max_context_len=140, **options)


def assert_follow(counts, probs):
    """Pearson's chi-square, as a standard normal; 4.5 is reached once in 300,000.

    Tokens that are expected fewer than five times count with the rarest of the others.
    """
    statistic, freedom = 0.0, 0
    for drawn, prob in zip(counts, probs, strict=True):
        expected, order = (drawn.sum() * prob).sort(descending=True)
        last = int((expected >= 5).sum()) - 1
        drawn = drawn[order]
        drawn, expected = (
            torch.cat((cells[:last], cells[last:].sum()[None])) for cells in (drawn, expected)
        )
        statistic += ((drawn - expected) ** 2 / expected).sum().item()
        freedom += last
    assert freedom >= len(counts) * 2, "too few draws to tell"
    assert (statistic - freedom) / math.sqrt(2 * freedom) < 4.5, (counts, probs)


def transitions(requests):
    counts = torch.zeros(VOCAB, VOCAB)
    for request in requests:
        text = [request.prompt_ids[-1], *request.output_ids]
        for before, after in pairwise(text):
            counts[before, after] += 1
    return counts


@pytest.mark.slow
@pytest.mark.parametrize(("generation", "topk"), [("v1", 1), ("v3", 2)])
def test_every_token_follows_the_target_at_its_temperature(engine_of, logits, generation, topk):
    """Two temperatures and greedy requests in one batch, drafts often right.

    Other generations draw the same tokens: see the test of equal seeds.
    """
    engine = engine_of(topk=topk, generation=generation, seed=topk, batch_sizes=[32])
    if generation == "v3":  # which loops only if it is captured
        engine.capture()
    requests = {
        temperature: [
            engine.submit([i % VOCAB], SamplingParams(max_new_tokens=60, temperature=temperature))
            for i in range(count)
        ]
        for temperature, count in ((0.0, 4), (0.6, 14), (2.0, 14))
    }
    finish(engine)
    went, greedy = transitions(requests[0.0]), logits.argmax(-1)
    assert went.gather(1, greedy[:, None]).sum() == went.sum() == 240, "greedy stays exact"
    for temperature in TEMPERATURES:
        assert_follow(transitions(requests[temperature]), (logits / temperature).softmax(-1))
    assert 1.2 < engine.stats.accept_length < 3.8, "some drafts are accepted, some refused"


def state_of(logits, temperature):
    """A request per row of logits, with the row's number as its row and seed, without filters."""
    state = RequestState(len(logits), logits.device)
    state.temperatures += temperature
    state.seeds += torch.arange(len(state.seeds), device=logits.device)
    return state


def drawn_from(logits, temperature):
    rows = torch.arange(len(logits), device=logits.device)
    return sample_tokens(TargetLogits(logits), rows, state_of(logits, temperature))


def test_first_tokens_follow_the_target(logits, device):
    for temperature in TEMPERATURES:
        drawn = drawn_from(logits[:1].to(device).expand(5000, -1), temperature)
        counts = torch.bincount(drawn.cpu(), minlength=VOCAB)[None].float()
        assert_follow(counts, (logits[:1] / temperature).softmax(-1))


@pytest.mark.slow
@each_generation
@chain_and_tree
@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
def test_greedy_requests_beside_sampled_ones_stay_exact(
    make_engine, task, generation, topk, captured
):
    engine = make_engine(topk=topk, generation=generation, batch_sizes=[8])
    if captured:
        engine.capture()
    requests = run_all(
        engine, task.prompts[:8], lambda i: SamplingParams(max_new_tokens=6, temperature=i % 2)
    )
    assert outputs(requests[::2]) == [t[:6] for t in task.expected[:8:2]]
    assert outputs(requests[1::2]) != [t[:6] for t in task.expected[1:8:2]]


@pytest.mark.slow
@each_generation
def test_a_seed_decides_what_is_drawn(make_engine, task, generation):
    drawn = []
    for seed in (1, 1, 2):
        engine = make_engine(topk=2, generation=generation, seed=seed)
        warm = SamplingParams(max_new_tokens=8, temperature=1.0)
        drawn.append(outputs(engine.generate(task.prompts[:4], warm)))
    assert drawn[0] == drawn[1] != drawn[2]


@each_generation
def test_a_cold_temperature_is_greedy(make_engine, task, generation):
    engine = make_engine(generation=generation)
    cold = SamplingParams(max_new_tokens=6, temperature=1e-5)
    requests = engine.generate(task.prompts[:4], cold)
    assert outputs(requests) == [t[:6] for t in task.expected[:4]]


@pytest.mark.parametrize("temperature", [1e-20, 1e-37, 1e-38, 1e-44, 1e-50, 1e-300])
def test_no_temperature_is_too_cold(temperature, device):
    """Logits divided by it leave float32, and below 1e-45 it is 0 there."""
    logits = torch.tensor([[1.0, 30.0, 20.0], [50.0, 4.0, -float("inf")]], device=device)
    assert drawn_from(logits, temperature).tolist() == [1, 0]
    state, rows = state_of(logits, temperature), torch.arange(2, device=device)
    probs = target_probs(
        logits, rows, state.temperatures, state.top_ks, state.top_ps, state.min_ps, 1
    )
    assert probs.tolist() == [[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]


def test_the_ends_of_the_ranges_are_accepted():
    SamplingParams(top_k=-1, top_p=1e-300, min_p=1, stop_token_ids=range(16))


@pytest.mark.slow
@chain_and_tree
def test_equal_seeds_draw_equal_tokens_in_any_batch_and_generation(make_engine, task, topk):
    params = [SamplingParams(max_new_tokens=8, temperature=0.9, seed=100 + i) for i in range(5)]
    texts = []
    for generation, batch in (("v1", 5), ("v2", 5), ("v3", 5), ("v2", 2), ("v3", 2), ("v1", 1)):
        engine = make_engine(
            topk=topk, generation=generation, max_batch_size=batch, batch_sizes=[batch]
        )
        if generation == "v3":
            engine.capture()
        requests = run_all(engine, task.prompts[:5], params)
        texts.append(outputs(requests))
    assert all(text == texts[0] for text in texts)
    assert len({tuple(text) for text in texts[0]}) == 5


@pytest.mark.parametrize("seed", [-3, 0, 2**70, np.int64(3)])
def test_any_int_is_the_seed_of_an_engine(make_engine, task, seed):
    warm = SamplingParams(max_new_tokens=6, temperature=1.0)
    requests = make_engine(seed=seed).generate([task.prompts[1]] * 3, warm)
    assert len({tuple(request.output_ids) for request in requests}) == 3
