"""The text of a seeded request is that of plain decoding, token for token.

The logits of the target are a table over token and position, the same bits in every batch.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch

from engine_runs import finish, outputs
from graphkit.config import BufferSizes
from graphkit.engine import SamplingParams, SpeculativeEngine
from graphkit.engine.step import SpecStepInputs, SpecStepRunner
from graphkit.engine.step.draft_tree import ChainTree
from graphkit.ops import philox_uniform
from graphkit.ops.sampling import target_samples
from graphkit.ops.target_probs import target_probs
from graphkit.spec import CustomSpecAlgorithm, SpecConfig
from table_models import StatelessDrafter, filtered, table_model

VOCAB, PERIOD, CONTEXT = 24, 5, 64
SETTINGS = (
    {"temperature": 0.8},
    {},
    {"temperature": 1.5, "top_k": 7},
    {"temperature": 1.2, "top_p": 0.8},
    {"temperature": 2.0, "min_p": 0.2},
    {"temperature": 1.0, "top_k": 12, "top_p": 0.9, "min_p": 0.05},
)
PROMPTS = [[5], [1, 2, 3], [7, 7], [0] * 9, [23, 4], [11, 12, 13, 14]]
PARAMS = [
    SamplingParams(**setting, max_new_tokens=5 + number, seed=70 + number)
    for number, setting in enumerate(SETTINGS)
]
PLAIN = SpecConfig("NONE", 0, 1, 1)


def table(device="cpu"):
    """Logits after each token at each position modulo ``PERIOD``, [V, PERIOD, V]."""
    generator = torch.Generator().manual_seed(4)
    return (torch.randn(VOCAB, PERIOD, VOCAB, generator=generator) * 1.5).to(device)


class Guesser(StatelessDrafter):
    """Proposes K chains from the root, made from what the target is going to draw.

    Args:
        guess: Called with the drafter, the tokens that the target will draw behind the root,
            [B, S], request rows and lengths; returns the drafts, [B, S, K].
    """

    def __init__(self, guess):
        self._guess = guess

    def prepare(self, context):
        self.context, self.topk, self.steps = context, context.spec.topk, context.spec.num_steps
        width, device = context.verify_width, context.device
        self._logits = table(device)
        self._tree = ChainTree(
            self.topk,
            width,
            context.sizes.max_batch_size,
            device,
            drafted=context.spec.num_draft_tokens,
        )

    @property
    def max_path(self):
        return self.steps + 1

    def draft(self, req_pool_indices, seq_lens, bonus_tokens):
        state, drawn = self.context.state, [bonus_tokens]
        filters = state.temperatures, state.top_ks, state.top_ps, state.min_ps
        for depth in range(self.steps):
            positions = seq_lens.long() + depth
            logits = self._logits[drawn[-1], positions % PERIOD]
            probs = target_probs(logits, req_pool_indices, *filters, 1)
            args = probs, req_pool_indices, state.seeds, positions[:, None]
            drawn.append(target_samples(*args))
        drafts = self._guess(self, torch.stack(drawn[1:], 1), req_pool_indices, seq_lens)
        return self._tree.of(torch.cat([bonus_tokens[:, None], drafts.flatten(1)], 1))


def oracle(drafter, drawn, rows, seq_lens):
    """The right tokens in the last chain, wrong ones in the others."""
    wrong = (drawn + 1) % VOCAB
    return torch.stack([wrong] * (drafter.topk - 1) + [drawn], 2)


def adversary(drafter, drawn, rows, seq_lens):
    """A wrong token at every node."""
    return torch.stack([(drawn + 1 + chain) % VOCAB for chain in range(drafter.topk)], 2)


def random_tokens(drafter, drawn, rows, seq_lens):
    """Tokens that the request's random numbers choose, most of them wrong."""
    count = drafter.steps * drafter.topk
    samples = drafter.context.draft_samples(rows, seq_lens, count)
    return (samples * VOCAB).long().view(-1, drafter.steps, drafter.topk)


def sometimes(drafter, drawn, rows, seq_lens):
    """Each of the right tokens with probability 3/4, in the last chain."""
    samples = drafter.context.draft_samples(rows, seq_lens, drafter.steps)
    wrong = (drawn + 1) % VOCAB
    last = torch.where(samples < 0.75, drawn, wrong)
    return torch.stack([wrong] * (drafter.topk - 1) + [last], 2)


def target(device, batch_size, page_size=1):
    logits = table(device)

    def logits_of(inputs):
        return logits[inputs.input_ids, inputs.positions % PERIOD]

    return table_model(logits_of, device, batch_size, CONTEXT, page_size=page_size)


def limits(batch_size, page_size):
    return BufferSizes(batch_size, CONTEXT, 8, VOCAB, torch.float32, page_size=page_size)


def generated(device, generation, batch_size=1, guess=None, spec=PLAIN):
    """Texts of all requests, of which one joins per step, and the mean of tokens per step."""
    with SpeculativeEngine(
        target(device, batch_size, spec.page_size),
        None if guess is None else Guesser(guess),
        spec=spec,
        sizes=limits(batch_size, spec.page_size),
        batch_sizes=sorted({1, batch_size}),
        device=device,
        generation=generation,
        steps_per_launch=3,
    ) as engine:
        if generation != "v1":
            engine.capture()
        requests = []
        for prompt, params in zip(PROMPTS, PARAMS, strict=True):
            requests.append(engine.submit(prompt, params))
            engine.step()
        finish(engine)
        return outputs(requests), engine.stats.accept_length


@cache
def plain(device):
    """Texts of requests that run alone, one token per step."""
    return generated(device, "v1")[0]


def simulated(prompt, params):
    """The text by the formula: filters in float64, then inverse transform of one number."""
    text, logits = list(prompt), table().double()
    for _ in range(params.max_new_tokens):
        position = len(text) - 1
        row = logits[text[-1], position % PERIOD]
        if params.temperature == 0:
            text.append(int(row.argmax()))
            continue
        probs = filtered(
            row,
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
        )
        kept = probs.nonzero().flatten()
        seed, at = torch.tensor([params.seed]), torch.tensor([position], dtype=torch.int32)
        coin = philox_uniform(seed, at, 1).item()
        text.append(int(kept[probs[kept].cumsum(0) > coin][0]))
    return text[len(prompt) :]


def test_a_token_is_the_sample_of_its_seed_and_position(device):
    assert plain(device) == [*map(simulated, PROMPTS, PARAMS)]


@pytest.mark.parametrize(("generation", "batch_size"), [("v2", 3), ("v3", 4)])
def test_without_a_drafter(device, generation, batch_size):
    assert generated(device, generation, batch_size)[0] == plain(device)


CASES = [
    (oracle, "v3", {"num_steps": 1, "topk": 1, "page_size": 4}, 3),
    (oracle, "v1", {"num_steps": 2, "topk": 1}, 2),
    (oracle, "v2", {"num_steps": 3, "topk": 1}, 4),
    (oracle, "v3", {"num_steps": 4, "topk": 1}, 1),
    (oracle, "v2", {"num_steps": 5, "topk": 1, "page_size": 4}, 3),
    (oracle, "v3", {"num_steps": 3, "topk": 4}, 4),
    (adversary, "v1", {"num_steps": 5, "topk": 1, "page_size": 4}, 4),
    (adversary, "v3", {"num_steps": 2, "topk": 2}, 3),
    (random_tokens, "v2", {"num_steps": 4, "topk": 1}, 4),
    (random_tokens, "v3", {"num_steps": 3, "topk": 4, "page_size": 4}, 2),
    (sometimes, "v1", {"num_steps": 3, "topk": 2, "page_size": 4}, 2),
    (sometimes, "v2", {"num_steps": 5, "topk": 2}, 1),
    (sometimes, "v3", {"num_steps": 3, "topk": 1}, 4),
    (sometimes, "v3", {"num_steps": 4, "topk": 2, "page_size": 4}, 3),
]
"""Drafts, generation, draft length and tree, and batch size."""


@pytest.mark.slow
@pytest.mark.parametrize(("guess", "generation", "settings", "batch_size"), CASES)
def test_any_drafts(device, guess, generation, settings, batch_size):
    """Right drafts, wrong drafts, and both."""
    steps = settings["num_steps"]
    spec = SpecConfig("EAGLE", **settings, num_draft_tokens=1 + steps * settings["topk"])
    texts, accepted = generated(device, generation, batch_size, guess, spec)
    assert texts == plain(device)
    if guess is oracle:
        assert accepted > 0.7 * (steps + 1), "all drafts of whole steps"
    elif guess is adversary:
        assert accepted == 1
    else:
        assert accepted > 1


class Wider(CustomSpecAlgorithm):
    """Verifies three more rows than the draft tree has nodes."""

    def get_num_tokens_per_bs_for_target_verify(self, num_draft_tokens, is_draft_worker):
        return num_draft_tokens + 3


@pytest.mark.slow
@pytest.mark.parametrize("guess", [oracle, sometimes])
@pytest.mark.parametrize(
    ("generation", "topk", "page_size"), [("v1", 2, 1), ("v2", 1, 4), ("v3", 1, 1), ("v3", 2, 4)]
)
def test_verify_may_be_wider_than_the_tree(device, guess, generation, topk, page_size):
    """The rows behind the tree are never accepted."""
    spec = SpecConfig(Wider("WIDER"), 3, topk, 1 + 3 * topk, page_size)
    texts, accepted = generated(device, generation, 4, guess, spec)
    assert texts == plain(device)
    assert 1 < accepted <= 4
    assert guess is not oracle or accepted > 2.8


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "options"),
    [
        ("EAGLE", {"generation": "v1", "num_steps": 2}),
        ("EAGLE", {"generation": "v2", "topk": 4, "num_steps": 3, "num_draft_tokens": 8}),
        ("EAGLE", {"generation": "v3", "topk": 4, "num_steps": 2, "page_size": 4}),
        ("EAGLE3", {"generation": "v1", "num_steps": 4}),
        ("STANDALONE", {"generation": "v2", "topk": 2, "num_steps": 5}),
        ("MULTI_LAYER_EAGLE", {"generation": "v1", "page_size": 4}),
        ("MULTI_LAYER_EAGLE", {"generation": "v3", "topk": 2}),
        ("NGRAM", {"generation": "v3", "num_steps": 5}),
    ],
)
def test_every_algorithm(make_engine, task, algorithm, options):
    """With drafts of a small Llama that are often right."""
    texts = []
    for kind, more in (("NONE", {"generation": "v2"}), (algorithm, options)):
        engine = make_engine(kind, max_batch_size=4, batch_sizes=[4], **more)
        if more["generation"] == "v3":
            engine.capture()
        requests = []
        for prompt, params in zip(task.prompts, PARAMS[:4], strict=False):
            requests.append(engine.submit(prompt, params))
            engine.step()
        finish(engine)
        texts.append(outputs(requests))
    assert texts[0] == texts[1]


WARM = SamplingParams(max_new_tokens=8, temperature=1.0)


def test_requests_without_a_seed_get_different_ones(device):
    with SpeculativeEngine(
        target(device, 3), spec=PLAIN, sizes=limits(3, 1), device=device, generation="v2"
    ) as engine:
        seeded = SamplingParams(max_new_tokens=8, temperature=1.0, seed=1)
        requests = [engine.submit([3], sampling) for sampling in (WARM, WARM, seeded)]
        finish(engine)
    assert len({tuple(request.output_ids) for request in requests}) == 3


def admitted(device, params):
    """Texts of a ``SpecStepRunner``, one request after the other."""
    model = target(device, 1)
    pool, texts = model.attention.req_to_token_pool, []
    with SpecStepRunner(model, spec=PLAIN, sizes=limits(1, 1), device=device) as runner:
        pool.req_to_token[1] = torch.arange(1, CONTEXT + 1, device=device)
        rows = torch.ones(1, dtype=torch.int64, device=device)
        for sampling in params:
            reports = [runner.admit(1, [3], sampling)]
            reports += [
                runner.run(SpecStepInputs(req_pool_indices=rows)).report.clone() for _ in range(7)
            ]
            texts.append(tuple(int(report[0, 5]) for report in reports))
    return texts


def test_admissions_without_a_seed_get_different_ones(device):
    """A repeated run derives the same seeds, which ranks of a group need."""
    texts = admitted(device, [WARM, WARM, WARM])
    assert len(set(texts)) == 3
    assert admitted(device, [WARM, WARM]) == texts[:2]
