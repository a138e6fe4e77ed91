"""Models in whole numbers that catch up on accepted tokens, and the same in plain loops.

Logits are a permutation of distinct values, so that no two tokens of a row tie.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from graphkit import BufferSizes, ForwardOutput, SpecConfig
from graphkit.buffers import AcceptedCounts, DraftExtendInputs, MultiLayerDraftExtendInputs

VOCAB, HIDDEN, MODULUS, MAX_REQUESTS = 31, 4, 64, 4
FACTORS = {
    "req_pool_indices": 5,
    "seq_lens": 1,
    "extend_seq_lens": 3,
    "num_accepted_drafts": 2,
    "num_accepted_tokens": 7,
}
"""How each fact of a request counts in each of its rows."""


def logits_of(mix):
    return ((mix % 30 + 1)[:, None] * torch.arange(VOCAB) + mix[:, None]) % VOCAB / 4


def logits_by_hand(mix):
    return [((mix % 30 + 1) * v + mix) % VOCAB / 4 for v in range(VOCAB)]


def top_by_hand(logits, topk):
    """(probabilities, tokens) of the likeliest, by sorting all."""
    weights = [np.exp(x - max(logits)) for x in logits]
    best = sorted(range(VOCAB), key=lambda token: -logits[token])[:topk]
    return [weights[token] / sum(weights) for token in best], best


class ExtendModel:
    """Each row sees itself, its request, and the rows of its request before it.

    Args:
        layer: Makes layers of a chain differ.
        logits, hidden: What it returns a row for: token, request, or nothing.
    """

    def __init__(self, layer=0, logits="token", hidden="token"):
        self.layer, self.logits, self.hidden = layer, logits, hidden
        self.calls, self.seen = 0, []

    def __call__(self, inputs):
        self.calls += 1
        self.seen.append(inputs)
        owner = self._owner(inputs)
        facts = sum(factor * getattr(inputs, name) for name, factor in FACTORS.items())
        mix = inputs.input_ids + 5 * inputs.positions + 7 * inputs.out_cache_loc + facts[owner]
        before = (owner[:, None] == owner) & torch.ones(len(owner), len(owner)).tril().bool()
        mix = mix + 11 * (before * inputs.input_ids).sum(1) + 13 * self.layer
        hidden = None
        if inputs.hidden_states is not None:
            given = inputs.hidden_states.unflatten(1, (-1, HIDDEN)).sum(1)
            hidden = (2 * given + mix[:, None] + torch.arange(HIDDEN)) % MODULUS
            mix = mix + hidden.sum(1).long()
        return ForwardOutput(
            next_token_logits=self._rows(inputs, logits_of(mix), self.logits),
            hidden_states=None if hidden is None else self._rows(inputs, hidden, self.hidden),
        )

    def _owner(self, inputs):
        row = torch.arange(inputs.num_tokens)
        if inputs.width is None:
            return row // inputs.tokens_per_request
        ends = inputs.num_accepted_tokens.cumsum(0)
        return (row[:, None] >= ends).sum(1).clamp(max=inputs.batch_size - 1)

    def _rows(self, inputs, rows, which):
        if which == "nothing":
            return None
        if which == "token":
            return rows
        chosen = getattr(inputs, "select_index", None)
        return rows.index_select(0, inputs.last_rows() if chosen is None else chosen)


def rows_by_hand(batch, request, rows, ids, given, layer=0):
    """(logits, hidden) of each of a request's rows, as ``ExtendModel`` makes them."""
    made = []
    for place, row in enumerate(rows):
        mix = ids[place] + 5 * int(batch.positions[row]) + 7 * int(batch.out_cache_loc[row])
        mix += sum(factor * int(getattr(batch, n)[request]) for n, factor in FACTORS.items())
        mix += 11 * sum(ids[: place + 1]) + 13 * layer
        hidden = None
        if given is not None:
            folded = [sum(given[place][j::HIDDEN]) for j in range(HIDDEN)]
            hidden = [(2 * h + mix + j) % MODULUS for j, h in enumerate(folded)]
            mix += sum(hidden)
        made.append((logits_by_hand(mix), hidden))
    return made


class ExtendCase:
    """A configuration of the extend modes: batches, runners, and the answer by hand."""

    def __init__(self, *settings, front=0, feed=1):
        self.spec, self.front = SpecConfig(*(settings or ("EAGLE", 3, 2, 6))), front
        self.sizes = BufferSizes(
            MAX_REQUESTS, 64, HIDDEN, VOCAB, torch.float32, spec_hidden_size=feed * HIDDEN
        )

    def runner(self, cls, forward, *, capture=True, **options):
        settings = {
            "spec": self.spec,
            "sizes": self.sizes,
            "batch_sizes": [1, 2, 4],
            "device": "cpu",
        }
        runner = cls(forward, **{**settings, **options})
        if capture:
            runner.capture()
        return runner

    def batch(self, counts, *, width=None, seed=0, kind=np.asarray, cls=DraftExtendInputs, **over):
        """``counts`` accepted tokens; packed, or ``width`` rows per request."""
        rng, counts = np.random.default_rng(seed), np.array(counts, np.int32)
        requests = len(counts)
        tokens = int(counts.sum()) if width is None else requests * width
        rows = {
            "req_pool_indices": rng.integers(1, 9, requests),
            "seq_lens": rng.integers(10, 50, requests).astype(np.int32),
            "extend_seq_lens": counts if width is None else np.full(requests, width, np.int32),
            "input_ids": rng.integers(0, VOCAB, tokens),
            "positions": rng.integers(0, 50, tokens),
            "out_cache_loc": rng.integers(1, 99, tokens),
            **AcceptedCounts.from_tokens(counts).fields(),
        }
        if cls is MultiLayerDraftExtendInputs:
            rows["select_index"] = np.arange(requests) * width + self.front + counts - 1
        rows = {name: kind(value) for name, value in rows.items()}
        if not self.spec.resolved.is_standalone():
            shape = tokens, self.sizes.spec_hidden_size
            rows["hidden_states"] = torch.from_numpy(rng.integers(0, 9, shape).astype(np.float32))
        return cls(**{**rows, **over})

    def rows(self, batch, layer=0):
        """(logits, hidden) of every row, request by request; in v1's form where no width fits."""
        ends, made = np.cumsum(np.asarray(batch.num_accepted_tokens)), []
        packed = ends[-1] == batch.num_tokens
        for request in range(batch.batch_size):
            width = batch.num_tokens // batch.batch_size
            last = int(ends[request]) if packed else (request + 1) * width
            first = last - (int(batch.num_accepted_tokens[request]) if packed else width)
            rows = list(range(first, last))
            given = (
                None if batch.hidden_states is None else batch.hidden_states[rows].int().tolist()
            )
            ids = [int(i) for i in batch.input_ids[rows]]
            made.append(rows_by_hand(batch, request, rows, ids, given, layer))
        return made


@pytest.fixture(scope="session")
def extend_case():
    """The class :class:`ExtendCase`."""
    return ExtendCase


@pytest.fixture(scope="session")
def make_model():
    """The class :class:`ExtendModel`."""
    return ExtendModel


@pytest.fixture(scope="session")
def by_hand():
    """``by_hand.rows(...)`` and ``by_hand.top(logits, topk)``."""

    class ByHand:
        rows, top = staticmethod(rows_by_hand), staticmethod(top_by_hand)

    return ByHand
