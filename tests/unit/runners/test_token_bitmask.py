"""A token bitmask of a batch masks the logits that the runner returns."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from graphkit import DecodeRunner, InputError, TargetVerifyRunner

WIDTHS = {TargetVerifyRunner: 4, DecodeRunner: 1}


@pytest.fixture(params=WIDTHS, ids=lambda kind: kind.mode.name)
def kind(request):
    return request.param


@pytest.fixture
def masked_runner(make_runner, kind):
    runner = make_runner(cls=kind, optional_fields=["token_bitmask"])
    runner.capture()
    return runner


def bitmask_of(allowed):
    """Rows of one word, as the vocabulary has 32 tokens, from a bool [T, 32]."""
    words = (allowed.astype(np.int64) << np.arange(32)).sum(1)
    return words.astype(np.uint32).view(np.int32)[:, None]


def masked(output, allowed):
    return torch.where(torch.from_numpy(allowed), output.next_token_logits, -torch.inf)


def test_every_run_is_masked(masked_runner, make_batch, expect, kind):
    random, width = np.random.default_rng(0), WIDTHS[kind]
    for turn, requests in enumerate([4, 1, 3, 2]):
        allowed = random.random((requests * width, 32)) < 0.5
        batch = make_batch(requests, width, seed=turn, token_bitmask=bitmask_of(allowed))
        plain = expect(make_batch(requests, width, seed=turn))
        for run in (masked_runner.replay, masked_runner.fall_back, masked_runner.run_padded):
            output = run(batch)
            assert torch.equal(output.next_token_logits, masked(plain, allowed))
            assert torch.equal(output.hidden_states, plain.hidden_states)


def test_pads_allow_every_token(masked_runner, make_batch, kind):
    width = WIDTHS[kind]
    for requests, bits in ((4, 5), (3, 6)):
        rows = np.full((requests * width, 1), bits, np.int32)
        masked_runner.replay(make_batch(requests, width, token_bitmask=rows))
    view = masked_runner.buffers.view(4)
    assert view.token_bitmask.flatten().tolist() == [6] * 3 * width + [-1] * width


def test_a_batch_without_the_bitmask_is_refused(masked_runner, make_batch, kind):
    with pytest.raises(InputError, match="'token_bitmask' is missing"):
        masked_runner.replay(make_batch(2, WIDTHS[kind]))


def test_a_runner_without_the_field_runs_eagerly(make_runner, make_batch, expect, kind):
    runner, width = make_runner(cls=kind), WIDTHS[kind]
    runner.capture()
    allowed = np.arange(32) == np.arange(2 * width)[:, None]
    batch = make_batch(2, width, token_bitmask=bitmask_of(allowed))
    with pytest.raises(InputError, match=r"optional_fields=\['token_bitmask'\]"):
        runner.run_padded(batch)
    plain = expect(make_batch(2, width))
    assert torch.equal(runner.run(batch).next_token_logits, masked(plain, allowed))
    assert runner.stats.fallbacks == {"field not captured": 1}
