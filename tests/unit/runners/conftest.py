"""A model whose arithmetic is exact, batches for it, and what it makes of them without a runner."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from graphkit import BufferSizes, ForwardOutput, SpecConfig, TargetVerifyInputs, TargetVerifyRunner
from graphkit.buffers import mailbox

VOCAB, HIDDEN, WIDTH = 32, 8, 4
DTYPES = {
    "req_pool_indices": torch.int64,
    "seq_lens": torch.int32,
    "input_ids": torch.int64,
    "positions": torch.int64,
    "out_cache_loc": torch.int64,
    "custom_mask": torch.bool,
    "input_embeds": torch.float32,
    "mrope_positions": torch.int64,
}


class Model:
    """Adds up all inputs; whole numbers, so that any kernel and any batch give the same bits."""

    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        self.embed = torch.randint(-4, 5, (VOCAB, HIDDEN), generator=generator).float()
        self.head = torch.randint(-4, 5, (HIDDEN, VOCAB), generator=generator).float()
        self.scale = 1
        """A host value: a graph bakes it."""
        self.calls = 0

    def __call__(self, inputs):
        self.calls += 1
        requests = inputs.seq_lens + 5 * inputs.req_pool_indices
        if inputs.custom_mask is not None:
            requests = requests + inputs.custom_mask.sum((1, 2))
        tokens = inputs.positions + 3 * inputs.out_cache_loc
        tokens = tokens + requests.repeat_interleave(
            inputs.tokens_per_request, output_size=inputs.num_tokens
        )
        if inputs.mrope_positions is not None:
            tokens = tokens + inputs.mrope_positions.sum(0)
        hidden = torch.nn.functional.embedding(inputs.input_ids, self.embed) + tokens[:, None]
        if inputs.input_embeds is not None:
            hidden = hidden + inputs.input_embeds
        return ForwardOutput(
            next_token_logits=hidden @ self.head * self.scale, hidden_states=hidden
        )


def _batch(requests, width=WIDTH, *, seed=0, kind="numpy", cls=TargetVerifyInputs, **over):
    rng = np.random.default_rng(seed)
    rows = {
        "req_pool_indices": rng.integers(1, 9, requests),
        "seq_lens": rng.integers(1, 50, requests).astype(np.int32),
        "input_ids": rng.integers(0, VOCAB, requests * width),
        "positions": rng.integers(0, 50, requests * width),
        "out_cache_loc": rng.integers(1, 99, requests * width),
    }
    for i, name in enumerate(rows):
        if kind == "torch" or (kind == "mixed" and i % 2):
            rows[name] = torch.from_numpy(rows[name])
    return cls(**{**rows, **over})


def _same(got, expected):
    assert got.tensors().keys() == expected.tensors().keys()
    for name, tensor in expected.tensors().items():
        assert torch.equal(getattr(got, name), tensor), name


@pytest.fixture(autouse=True)
def give_up_soon(monkeypatch):
    """The recorder consumes at once: a wait is a bug, and need not last a minute."""
    monkeypatch.setattr(mailbox, "_GIVE_UP_S", 0.5)


@pytest.fixture
def model():
    return Model()


@pytest.fixture(scope="session")
def spec():
    return SpecConfig(algorithm="EAGLE", num_steps=3, topk=1, num_draft_tokens=4)


@pytest.fixture(scope="session")
def sizes():
    return BufferSizes(
        max_batch_size=4,
        max_context_len=64,
        hidden_size=HIDDEN,
        vocab_size=VOCAB,
        dtype=torch.float32,
    )


@pytest.fixture
def make_runner(model, spec, sizes):
    """``make_runner(forward, cls=, **options)``: planned, for sizes 1, 2 and 4 of 4 rows each."""

    def make(forward=None, *, cls=TargetVerifyRunner, **options):
        settings = {"spec": spec, "sizes": sizes, "batch_sizes": [1, 2, 4], "device": "cpu"}
        return cls(forward or model, **{**settings, **options})

    return make


@pytest.fixture
def runner(make_runner):
    """A captured runner of the model."""
    runner = make_runner()
    runner.capture()
    return runner


@pytest.fixture(scope="session")
def make_batch():
    """``make_batch(requests, width, seed=, kind=, **fields)``; kind is numpy, torch or mixed."""
    return _batch


@pytest.fixture
def expect(model):
    """``expect(batch)``: the model's own answer to the live rows."""

    def answer(batch):
        calls = model.calls
        rows = {name: getattr(batch, name) for name in DTYPES}
        rows = {
            name: torch.from_numpy(np.asarray(value).copy()).to(DTYPES[name])
            for name, value in rows.items()
            if value is not None
        }
        output = model(TargetVerifyInputs(**rows))
        model.calls = calls
        return output

    return answer


@pytest.fixture(scope="session")
def assert_same():
    """``assert_same(got, expected)``: every field of the output, to the bit."""
    return _same


@pytest.fixture(scope="session")
def stage():
    """``stage(runner, batch, **fields)``: a staged batch with these rows, all of them assigned."""

    def stage(runner, batch, **fields):
        staged = runner.stage(batch.batch_size, batch.num_tokens)
        for name, rows in (vars(batch) | fields).items():
            if rows is not None:
                setattr(staged, name, rows)
        return staged

    return stage


@pytest.fixture(scope="session")
def poison():
    """``poison(runner)``: garbage in every row of every field that a refresh should write."""

    def fill(runner):
        for tensor in runner.buffers.arena.tensors.values():
            tensor.fill_(1 if tensor.dtype is torch.bool else 55)

    return fill


@pytest.fixture
def assert_in_step():
    """``assert_in_step(runner)``: host and device agree on whose turn it is."""

    def check(runner):
        mailbox = runner.buffers.mailbox
        assert mailbox.ring[:2].tolist() == [mailbox.sequence, 0]

    return check
