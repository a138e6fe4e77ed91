"""Sampled text follows the filtered distribution of the target, token by token.

Target and drafter are tables: the logits after a token depend on the token alone. So every token of
a text is a draw from one row of a table, and one text samples many rows.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
import torch

from engine_runs import chain_and_tree, finish
from graphkit.engine import SamplingParams
from graphkit.engine.step.draft_tree import ChainTree
from table_models import STEPS, StatelessDrafter, filtered, table_engine

VOCAB, REQUESTS, NEW = 16, 8, 200
GREEDY = {"temperature": 0.0, "top_k": 3, "top_p": 0.5, "min_p": 0.1}
SETTINGS = (
    {"temperature": 0.6},
    {"temperature": 1.0, "top_k": 4},
    {"temperature": 1.3, "top_p": 0.7},
    {"temperature": 2.0, "min_p": 0.3},
    {"temperature": 1.5, "top_k": 9, "top_p": 0.8, "min_p": 0.15},
    {"temperature": 1.0, "top_p": 0.9, "min_p": 0.05},
    {"temperature": 1.2, "logit_bias": {1: -torch.inf, 4: 1.0, 7: -torch.inf, 9: -1.0}},
)
LIKELY = 1e-3
"""p-value that a correct rule stays above, seeds being fixed."""
with_and_without = pytest.mark.parametrize(
    "has_probs", [False, True], ids=["drafts", "draft_probs"]
)


def table(seed):
    """Logits after each token, [V, V] float32."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(VOCAB, VOCAB, generator=generator) * 1.5


class TableDrafter(StatelessDrafter):
    """Samples K chains that start at the root from a table, the first drafts without replacement.

    Args:
        has_probs: Whether its trees have ``draft_probs``.
    """

    max_path = STEPS + 1

    def __init__(self, has_probs):
        self._has_probs = has_probs

    def prepare(self, context):
        self._context, self._topk = context, context.spec.topk
        width, batch_size = context.verify_width, context.sizes.max_batch_size
        self._tree = ChainTree(self._topk, width, batch_size, context.device)
        # Close to the target: about half of the drafts are accepted.
        self._probs = (table(1) + table(2) / 2).softmax(1).to(context.device)

    def draft(self, req_pool_indices, seq_lens, bonus_tokens):
        width, topk = self._context.verify_width, self._topk
        samples = self._context.draft_samples(req_pool_indices, seq_lens, width - 1)
        tokens = bonus_tokens[:, None].repeat(1, width)
        left = self._probs[bonus_tokens]
        for node in range(1, width):
            if node > topk:
                left = self._probs[tokens[:, node - topk]]
            share = left.cumsum(1) / left.sum(1, keepdim=True)
            drawn = (share <= samples[:, node - 1 : node]).sum(1).clamp(max=VOCAB - 1)
            tokens[:, node] = drawn
            left = left.scatter(1, drawn[:, None], 0.0)
        probs = self._probs[tokens].flatten(0, 1) if self._has_probs else None
        return replace(self._tree.of(tokens), draft_probs=probs)


@cache
def sampled(device, topk, has_probs, generation, new, start=0, stride=1):
    """Texts of ``REQUESTS`` requests per setting and of two greedy ones, or some of them.

    Returns the texts and the mean number of accepted drafts.
    """
    settings = [*SETTINGS * REQUESTS, GREEDY, {}]
    params = [
        SamplingParams(**setting, max_new_tokens=new, seed=10_000 + number)
        for number, setting in enumerate(settings)
    ][start::stride]
    drafter = TableDrafter(has_probs)
    settings = {"context_len": NEW + 30, "max_batch_size": len(params), "generation": generation}
    with table_engine(table(1).to(device), topk, drafter, **settings) as engine:
        requests = [engine.submit([each.seed % VOCAB], each) for each in params]
        finish(engine)
        texts = [(*request.prompt_ids, *request.output_ids) for request in requests]
        return texts, engine.stats.accept_length - 1


def p_value(texts, setting, logits=None):
    """Pearson's chi-square over all rows; 0 if a token comes that was filtered.

    Cells that expect fewer than five draws count together.
    """
    counts = torch.zeros(VOCAB, VOCAB, dtype=torch.float64)
    for text in texts:
        for before, after in pairwise(text):
            counts[before, after] += 1
    logits, filters = table(1) if logits is None else logits, dict(setting)
    for token, bias in filters.pop("logit_bias", {}).items():
        logits[:, token] += bias
    probs = torch.stack([filtered(row, **filters) for row in logits])
    if counts[probs == 0].any():
        return 0.0
    expected = probs * counts.sum(1, keepdim=True)
    statistic, freedom = 0.0, 0
    for drawn, wanted in zip(counts, expected, strict=True):
        is_rare = wanted < 5
        cells = [*zip(drawn[~is_rare], wanted[~is_rare], strict=True)]
        cells.append((drawn[is_rare].sum(), wanted[is_rare].sum()))
        common = [(one, other) for one, other in cells if other >= 2]
        statistic += sum(float((one - other) ** 2 / other) for one, other in common)
        freedom += max(len(common) - 1, 0)
    assert freedom > 10, "too few draws to tell"
    return float(torch.special.gammaincc(torch.tensor(freedom / 2), torch.tensor(statistic / 2)))


@pytest.mark.slow
@chain_and_tree
@with_and_without
@pytest.mark.parametrize("setting", range(len(SETTINGS)), ids=lambda i: " ".join(SETTINGS[i]))
def test_texts_follow_the_filtered_distribution(device, topk, has_probs, setting):
    """In one launch per 16 steps, in a batch of requests with all filters."""
    texts, _ = sampled(device, topk, has_probs, "v3", NEW)
    chosen = texts[: len(SETTINGS) * REQUESTS][setting :: len(SETTINGS)]
    assert p_value(chosen, SETTINGS[setting]) > LIKELY


@pytest.mark.slow
@chain_and_tree
@with_and_without
def test_filters_do_not_change_greedy_requests(device, topk, has_probs):
    texts, _ = sampled(device, topk, has_probs, "v3", NEW)
    best = table(1).argmax(1).tolist()
    for text in texts[-2:]:
        assert all(best[before] == after for before, after in pairwise(text))


@pytest.mark.slow
@chain_and_tree
@with_and_without
@pytest.mark.parametrize(
    ("generation", "start", "stride"), [("v1", 0, 1), ("v2", 1, 5), ("v1", 4, 99), ("v3", 3, 9)]
)
def test_a_text_depends_on_its_seed_alone(device, topk, has_probs, generation, start, stride):
    """Not on the generation, nor on the batch, of which some have a few requests or one."""
    texts, _ = sampled(device, topk, has_probs, "v3", NEW)
    some, _ = sampled(device, topk, has_probs, generation, 12, start, stride)
    assert some == [text[:13] for text in texts[start::stride]]


@with_and_without
def test_rejection_sampling_alone_depends_on_the_tree(device, has_probs):
    chains, _ = sampled(device, 1, has_probs, "v3", NEW)
    trees, _ = sampled(device, 2, has_probs, "v3", NEW)
    assert (chains == trees) is not has_probs
    assert chains[-2:] == trees[-2:], "greedy requests"


@chain_and_tree
def test_known_probabilities_accept_more_drafts(device, topk):
    _, without = sampled(device, topk, False, "v3", NEW)
    _, known = sampled(device, topk, True, "v3", NEW)
    assert 0.2 < without < known - 0.1


ALLOWED = (torch.arange(VOCAB)[:, None] + torch.arange(VOCAB)) % 3 != 0
"""What may follow each token in a constrained text."""


class RowMatcher:
    """A ``TokenMatcher`` of ``ALLOWED``, behind a token."""

    words = (ALLOWED.int() << torch.arange(VOCAB)).sum(1).tolist()

    def __init__(self, token):
        self._text = [token]

    def fill_next_token_bitmask(self, bitmask, index):
        bitmask[index, 0] = self.words[self._text[-1]]

    def accept_token(self, token):
        is_allowed = bool(self.words[self._text[-1]] >> token & 1)
        self._text += [token] * is_allowed
        return is_allowed

    def rollback(self, count):
        del self._text[-count:]

    def is_terminated(self):
        return False


def constrained(device, topk, has_probs):
    """Texts of four requests per setting, each with a matcher, and one without."""
    settings = [*SETTINGS * 4, {"temperature": 1.0}]
    params = [
        SamplingParams(**setting, max_new_tokens=NEW, seed=20_000 + number)
        for number, setting in enumerate(settings)
    ]
    drafter = TableDrafter(has_probs)
    options = {"context_len": NEW + 30, "generation": "v2", "structured_output": True}
    with table_engine(
        table(1).to(device), topk, drafter, max_batch_size=len(params), **options
    ) as engine:
        requests = [
            engine.submit(
                [each.seed % VOCAB],
                each,
                matcher=None if number == len(params) - 1 else RowMatcher(each.seed % VOCAB),
            )
            for number, each in enumerate(params)
        ]
        finish(engine)
        return [(*request.prompt_ids, *request.output_ids) for request in requests]


@pytest.mark.slow
@chain_and_tree
@with_and_without
def test_constrained_texts_follow_the_masked_and_filtered_distribution(device, topk, has_probs):
    texts = constrained(device, topk, has_probs)
    masked = table(1).where(ALLOWED, -torch.inf)
    for number, setting in enumerate(SETTINGS):
        assert p_value(texts[:-1][number :: len(SETTINGS)], setting, masked) > LIKELY, setting
    before_and_after = [*pairwise(texts[-1])]
    assert not all(ALLOWED[before, after] for before, after in before_and_after)
