"""Claims, posts, commits, staged entries and replays in any order, right and wrong ones.

As long as callers keep to the runner's own verbs, every replay gives its own batch's rows. Code
that uses the mailbox directly may bring host and device out of step. That may end in a ReplayError,
but not in a crash, another error, or an endless wait.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test as run_machine,
)

import graphkit as gk
from graphkit.buffers import mailbox

WIDTH, LARGEST = 2, 4
FIELDS = ("req_pool_indices", "seq_lens", "input_ids", "positions", "out_cache_loc")


def forward(inputs):
    """Tells of every field of every row, exactly."""
    request = 3 * inputs.req_pool_indices + 5 * inputs.seq_lens
    rows = inputs.input_ids + 7 * inputs.positions + 11 * inputs.out_cache_loc
    rows = rows + request.repeat_interleave(WIDTH, output_size=inputs.num_tokens)
    return gk.ForwardOutput(next_token_logits=rows[:, None].double())


def batch_of(live, seed):
    random = np.random.default_rng(seed)
    return gk.TargetVerifyInputs(
        req_pool_indices=random.integers(1, 9, live),
        seq_lens=random.integers(1, 99, live).astype(np.int32),
        input_ids=random.integers(0, 99, live * WIDTH),
        positions=random.integers(0, 99, live * WIDTH),
        out_cache_loc=random.integers(1, 99, live * WIDTH),
    )


def expected(batch):
    tensors = {name: torch.from_numpy(np.asarray(getattr(batch, name))) for name in FIELDS}
    return forward(gk.TargetVerifyInputs(**tensors)).next_token_logits


LIVE = st.integers(1, LARGEST)
SEED = st.integers(0, 99)


class Callers(RuleBasedStateMachine):
    """Everyone who may use one runner."""

    by_hand = False

    @initialize()
    def capture(self):
        self.runner = gk.TargetVerifyRunner(
            forward,
            spec=gk.SpecConfig("EAGLE", WIDTH - 1, 1, WIDTH),
            sizes=gk.BufferSizes(LARGEST, 128, 4, 1, torch.float32),
            batch_sizes=[1, 2, LARGEST],
            device="cpu",
        )
        self.runner.capture()
        self.staged = []
        self.in_step = True

    def teardown(self):
        if hasattr(self, "runner"):
            self.runner.close()

    def right(self, output, batch):
        if self.in_step:
            assert torch.equal(output.next_token_logits, expected(batch))

    def replayed(self, call, batch):
        """Make a call that must work unless host and device are out of step."""
        try:
            output = call()
        except gk.ReplayError:
            assert not self.in_step
        else:
            self.right(output, batch)

    @rule(live=LIVE, seed=SEED, padded=st.sampled_from([None, LARGEST]))
    def replay(self, live, seed, padded):
        batch = batch_of(live, seed)
        self.replayed(lambda: self.runner.replay(batch, padded_batch_size=padded), batch)

    @rule(live=st.integers(0, LARGEST + 2), seed=SEED)
    def run(self, live, seed):
        batch = batch_of(live, seed)
        self.replayed(lambda: self.runner.run(batch), batch)

    @rule(live=LIVE, seed=SEED, name=st.sampled_from(FIELDS), rows=st.sampled_from([0, 9]))
    def replay_what_is_wrong(self, live, seed, name, rows):
        batch = batch_of(live, seed)
        setattr(batch, name, np.zeros(rows, dtype=np.int64))
        try:
            self.runner.replay(batch)
        except gk.GraphkitError:
            return
        assert not (rows and live), "an empty or longer field was taken"

    @rule(live=LIVE, seed=SEED)
    def stage(self, live, seed):
        try:
            self.staged.append([self.runner.stage(live), batch_of(live, seed), False])
        except gk.ReplayError:
            assert not self.in_step

    @precondition(lambda self: self.staged)
    @rule(data=st.data(), by_field=st.booleans())
    def write(self, data, by_field):
        """Into an entry that may be another's by now: then it must not show in its replays."""
        entry = data.draw(st.sampled_from(self.staged))
        staged, batch, _ = entry
        if self.is_over(staged):
            with pytest.raises(gk.ReplayError):
                staged.seq_lens = batch.seq_lens
            return
        for name in FIELDS:
            if by_field:
                setattr(staged, name, getattr(batch, name))
            else:
                getattr(staged, name)[:] = getattr(batch, name)
        entry[2] = True

    @precondition(lambda self: self.staged)
    @rule(data=st.data())
    def write_what_is_wrong(self, data):
        staged, _, _ = data.draw(st.sampled_from(self.staged))
        with pytest.raises(gk.ReplayError if self.is_over(staged) else gk.InputError):
            staged.seq_lens = data.draw(st.sampled_from([None, "x", np.zeros(9), 2.5]))
        with pytest.raises(gk.InputError):
            staged.nothing = 3

    @precondition(lambda self: self.staged)
    @rule(data=st.data())
    def replay_staged(self, data):
        staged, batch, is_written = data.draw(st.sampled_from(self.staged))
        over = self.is_over(staged)
        try:
            output = staged.replay()
        except gk.ReplayError:
            assert over or not self.in_step
        else:
            assert not over
            if is_written:
                self.right(output, batch)

    def is_over(self, staged):
        return vars(staged)["_claim"] != self.runner.buffers.mailbox.claims

    @rule(shadow=st.sampled_from(["padded", None]))
    def shadow(self, shadow):
        self.runner.shadow = shadow

    @invariant()
    def host_and_device_agree(self):
        if hasattr(self, "runner") and self.in_step:
            ring = self.runner.buffers.mailbox
            assert ring.ring[:2].tolist() == [ring.sequence, 0]


class ByHand(Callers):
    """The same, and calls of the mailbox without the runner."""

    @rule(times=st.integers(1, 6))
    def claim(self, times):
        for _ in range(times):
            self.try_it(self.runner.buffers.mailbox.claim)

    @rule(index=st.integers(0, 3), requests=st.integers(0, 9), tokens=st.integers(0, 9))
    def post(self, index, requests, tokens):
        self.runner.buffers.mailbox.post(index, min(requests, LARGEST), min(tokens, 8))

    @rule()
    def commit(self):
        self.in_step = False
        self.runner.buffers.mailbox.commit()

    @rule()
    def post_idle(self):
        self.in_step = False
        self.try_it(self._post_idle)

    @rule()
    def rewind(self):
        self.runner.buffers.mailbox.rewind()

    def _post_idle(self):
        with self.runner.buffers.posted():
            pass

    def try_it(self, call):
        try:
            call()
        except gk.ReplayError:
            assert not self.in_step


@pytest.fixture(autouse=True)
def give_up_soon(monkeypatch):
    monkeypatch.setattr(mailbox, "_GIVE_UP_S", 0.002)
    monkeypatch.setattr(mailbox, "_CHECK_EVERY", 1)


@pytest.mark.slow
@pytest.mark.parametrize("callers", [Callers, ByHand], ids=["by verbs", "by hand"])
def test_any_order_ends_well(many, callers):
    run_machine(callers, settings=many(40, stateful_step_count=25))
