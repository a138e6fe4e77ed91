"""A small captured model to plant bugs in, and a watch over its replays."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import graphkit as gk
from graphkit.audit import ShadowWatch
from tiny_target import SLOTS, VERIFY, VOCAB, WIDTH, small_target

HIDDEN = 8


class Tiny(nn.Module):
    """Two layers with ``mix(self, hidden, inputs)`` between them, where tests plant bugs."""

    def __init__(self, mix=lambda _model, hidden, _inputs: hidden):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, VOCAB)
        self.register_buffer("cache", torch.zeros(SLOTS, HIDDEN))
        self.mix = mix
        self.scale, self.steps, self.place = 1.0, 0, 20
        self.requires_grad_(False)

    def forward(self, inputs):
        self.steps += 1
        hidden = self.embedding(inputs.input_ids) + inputs.positions[:, None] / 64
        hidden = self.mix(self, hidden, inputs)
        return gk.ForwardOutput(next_token_logits=self.head(hidden), hidden_states=hidden)


@pytest.fixture
def tiny():
    """Return the class ``Tiny``."""
    return Tiny


@pytest.fixture
def scaled():
    """Return a ``mix`` that multiplies by a host value."""

    def scaled(model, hidden, inputs):
        return hidden * model.scale

    return scaled


@pytest.fixture
def storing():
    """Return a ``mix`` that writes rows to the cache, and adds the rows that were there."""

    def storing(model, hidden, inputs):
        before = model.cache[inputs.out_cache_loc]
        model.cache.index_copy_(0, inputs.out_cache_loc, hidden + before / 2)
        return hidden + before

    return storing


@pytest.fixture
def batch_of():
    """Return ``batch_of(requests, seed)``."""

    def make(requests, seed=0):
        random = np.random.default_rng([seed, requests])
        tokens = requests * WIDTH
        return gk.TargetVerifyInputs(
            req_pool_indices=np.arange(1, requests + 1),
            seq_lens=np.full(requests, 5),
            input_ids=random.integers(0, VOCAB, tokens),
            positions=random.integers(0, 50, tokens),
            out_cache_loc=np.arange(1, tokens + 1),
        )

    return make


@pytest.fixture
def target_of(batch_of):
    """Return ``target_of(model, **changes)``: sizes 1 and 4, its cache is state."""

    def make(model, **changes):
        facts = {
            "sample_batch": lambda mode, batch_size, seed: batch_of(batch_size, seed),
            "weights": model,
            "mutable_state": {"cache": model.cache},
            "batch_sizes": [1, 4],
        }
        return small_target(model, **facts | changes)

    return make


@pytest.fixture
def capture(target_of):
    """Return ``capture(mix)``: a captured runner, and its model."""
    made = []

    def make(*mix, **changes):
        model = Tiny(*mix)
        runner = target_of(model, **changes).runner(VERIFY, device="cpu")
        runner.capture()
        made.append(runner)
        return runner, model

    yield make
    for runner in made:
        runner.close()


@pytest.fixture
def unseen_numbers(monkeypatch):
    """Hide what has changed on the host, like values that the walk of objects does not reach."""
    monkeypatch.setattr(gk.Runner, "frozen_values", lambda *_: [])


@pytest.fixture
def watched():
    """Return ``watched(runner, batches)``: a watch that compared every replay."""

    def watch_all(runner, batches, **options):
        model = runner.step.forward.__closure__[0].cell_contents
        with ShadowWatch(runner, **({"every": 1, "weights": model} | options)) as watch:
            for batch in batches:
                runner.replay(batch)
        return watch

    return watch_all
