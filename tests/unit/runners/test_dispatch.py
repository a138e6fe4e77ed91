"""Which way a batch goes, why, and how that is counted."""

from __future__ import annotations

import numpy as np
import pytest

from graphkit import (
    AttentionBackend,
    Decision,
    InputError,
    ReplayError,
    ReplayStats,
    SpecConfig,
    TargetVerifyRunner,
)
from graphkit.runners import Reason

ROWS = np.zeros((3, 12), np.int64)


@pytest.fixture
def case(make_runner, make_batch):
    """``case(reason)``: a runner and a batch that it does not replay for this reason."""

    def make(reason):
        runner, batch = make_runner(), make_batch(3)
        if reason is Reason.UNSUPPORTED_ATTENTION:
            runner = make_runner(cls=MayStayEager, attention=Unwilling())
        if reason is not Reason.NOT_CAPTURED:
            runner.capture()
        if reason is Reason.CLOSED:
            runner.close()
        match reason:
            case Reason.BATCH_TOO_LARGE:
                batch = make_batch(6)
            case Reason.WRONG_WIDTH:
                batch = make_batch(3, 2)
            case Reason.FIELD_NOT_CAPTURED:
                batch = make_batch(3, mrope_positions=ROWS)
            case Reason.BAD_FIELD:
                batch = make_batch(3, seq_lens=np.zeros(5))
        return runner, batch

    return make


class Unwilling(AttentionBackend):
    """Supports no graphs, only steps that run without one."""

    def supports(self, mode):
        return False

    def init_state(self, sizes, max_tokens):
        self.is_ready = True

    def metadata(self, mode, inputs):
        assert self.is_ready, "prepared before it is used"


class MayStayEager(TargetVerifyRunner):
    """A mode whose runner does without graphs where its backend does."""

    may_stay_eager = True


TEXTS = {
    Reason.NOT_CAPTURED: "the runner is planned, not captured",
    Reason.CLOSED: "the runner is closed, not captured",
    Reason.BATCH_TOO_LARGE: "the batch has 6 requests; the largest captured size is 4",
    Reason.WRONG_WIDTH: "the batch has 6 tokens in 3 requests; captured are 4 tokens per request",
    Reason.FIELD_NOT_CAPTURED: "field 'mrope_positions' was not captured. Pass "
    "optional_fields=['mrope_positions'] to the runner.",
    Reason.UNSUPPORTED_ATTENTION: "attention backend Unwilling does not support "
    "TARGET_VERIFY graphs",
    Reason.BAD_FIELD: "field 'seq_lens' has shape (5,). This batch needs (3,).",
}
EAGER = [reason for reason in Reason if reason.has_eager_way]


def test_every_reason_has_a_text_of_its_own():
    assert set(TEXTS) == set(Reason)
    assert [reason.value for reason in Reason if reason not in EAGER] == ["closed", "bad field"]


@pytest.mark.parametrize("reason", Reason)
def test_can_replay_says_why_not(case, model, reason):
    runner, batch = case(reason)
    calls, sequence = model.calls, runner.buffers.mailbox.sequence
    assert runner.can_replay(batch) == Decision(False, TEXTS[reason], None, reason)
    assert (model.calls, runner.buffers.mailbox.sequence) == (calls, sequence)
    assert runner.stats.fallbacks == {}


@pytest.mark.parametrize("reason", EAGER)
def test_run_falls_back_and_counts(case, expect, assert_same, model, reason):
    runner, batch = case(reason)
    calls = model.calls
    for times in (1, 2, 3):
        assert_same(runner.run(batch), expect(batch))
        assert runner.stats.fallbacks == {reason.value: times}
    assert model.calls == calls + 3
    assert runner.stats.replays == 0


@pytest.mark.parametrize(
    ("reason", "error"), [(Reason.CLOSED, ReplayError), (Reason.BAD_FIELD, InputError)]
)
def test_run_refuses_what_has_no_eager_way(case, reason, error):
    runner, batch = case(reason)
    with pytest.raises(error):
        runner.run(batch)
    assert runner.stats.fallbacks == {}


@pytest.mark.parametrize(("requests", "padded"), [(0, 0), (1, 1), (2, 2), (3, 4), (4, 4)])
def test_can_replay_names_the_size(runner, make_batch, requests, padded):
    assert runner.can_replay(make_batch(requests)) == Decision(True, "", padded)


def test_stats_add_up(runner, make_batch):
    for requests in (3, 3, 1, 4, 0):
        runner.run(make_batch(requests))
    runner.replay(make_batch(1), padded_batch_size=4)
    runner.run(make_batch(9))
    runner.run(make_batch(2, 3))
    runner.run(make_batch(9))
    runner.fall_back(make_batch(2))  # asked for: nothing to explain
    assert runner.stats == ReplayStats(
        replays=5,
        padded_rows=(1 + 1 + 3) * 4,
        fallbacks={"batch too large": 2, "wrong width": 1},
        replays_by_size={1: 1, 4: 4},
        live_sizes={1: 2, 3: 2, 4: 1},
    )
    assert list(runner.stats.replays_by_size) == [1, 4]


def test_stats_are_a_snapshot(runner, make_batch):
    before = runner.stats
    runner.run(make_batch(9))
    assert before.fallbacks == {}


def test_a_fallback_that_fails_is_not_counted(make_runner, make_batch, model):
    def forward(inputs):
        if inputs.batch_size > 4:
            raise RuntimeError("too much")
        return model(inputs)

    runner = make_runner(forward)
    runner.capture()
    with pytest.raises(RuntimeError, match="too much"):
        runner.run(make_batch(5))
    assert runner.stats.fallbacks == {}


@pytest.mark.parametrize("tokens", [7, 9])
def test_tokens_that_no_width_explains_are_refused(runner, make_batch, tokens):
    rows = {name: np.zeros(tokens, np.int64) for name in ("input_ids", "positions")}
    batch = make_batch(2, **rows, out_cache_loc=np.zeros(tokens, np.int64))
    assert runner.can_replay(batch).kind is Reason.WRONG_WIDTH
    with pytest.raises(InputError, match=rf"'input_ids' has shape \({tokens},\)"):
        runner.run(batch)
    with pytest.raises(InputError, match=rf"'input_ids' has shape \({tokens},\)"):
        runner.replay(batch)


@pytest.mark.parametrize("tokens", [0, 2])
def test_requests_without_rows_are_refused(runner, make_batch, tokens):
    """As many as nothing else would explain; an answer without rows would pass for one."""
    names = ("input_ids", "positions", "out_cache_loc")
    batch = make_batch(3, **{name: np.zeros(tokens, np.int64) for name in names})
    assert runner.can_replay(batch).kind is Reason.WRONG_WIDTH
    for way in (runner.run, runner.fall_back):
        with pytest.raises(InputError, match=rf"shape \({tokens},\)\. This batch needs \(3,\)"):
            way(batch)
    assert runner.stats.fallbacks == {}


def test_the_width_of_a_mask_follows_the_batch(make_runner, make_batch, expect, assert_same):
    runner = make_runner(optional_fields=["custom_mask"])
    runner.capture()
    batch = make_batch(2, 3, custom_mask=np.ones((2, 3, 3), bool))
    assert_same(runner.run(batch), expect(batch))
    with pytest.raises(InputError, match="'custom_mask'"):
        runner.run(make_batch(2, 3, custom_mask=np.ones((2, 4, 4), bool)))


def test_a_tree_without_its_mask_has_no_eager_way_either(make_runner, make_batch):
    """Run as a chain it would give an answer, and a wrong one."""
    runner = make_runner(spec=SpecConfig("EAGLE", 3, 2, 4))
    runner.capture()
    for requests in (2, 9):
        with pytest.raises(InputError, match="'custom_mask' is missing"):
            runner.run(make_batch(requests))
