"""What a runner asks of an attention backend, and when."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from graphkit import AttentionBackend, ConfigError, DecodeRunner, ForwardMode, ReplayError


class Spy(AttentionBackend):
    """Notes what it is asked; its metadata is the lengths after this step."""

    seq_len_fill_value = 7

    def __init__(self, modes=tuple(ForwardMode)):
        self.modes, self.states, self.asked = modes, [], []

    def supports(self, mode):
        return mode in self.modes

    def init_state(self, sizes, max_tokens):
        self.states.append((sizes.max_batch_size, max_tokens))

    def metadata(self, mode, inputs):
        made = SimpleNamespace(cache_seqlens=inputs.seq_lens + inputs.tokens_per_request)
        self.asked.append((mode, inputs.batch_size, made))
        return made


class Planner(Spy):
    """Plans on the host, into memory that the graph reads."""

    def __init__(self):
        super().__init__()
        self.plan = torch.zeros(1)
        self.planned = []
        self.error = None

    def before_replay(self, mode, batch, padded_batch_size):
        if self.error:
            raise self.error
        self.planned.append((mode, batch, padded_batch_size))
        self.plan.fill_(len(self.planned))


@pytest.fixture
def make_attending(make_runner, model):
    """A planned runner whose forward adds the metadata, and the plan if there is one."""

    def make(attention, **options):
        def forward(inputs):
            output = model(inputs)
            lengths = inputs.attention.cache_seqlens.sum() + getattr(attention, "plan", 0)
            output.hidden_states = output.hidden_states + lengths
            return output

        return make_runner(forward, attention=attention, **options)

    return make


@pytest.mark.parametrize(("cls", "width"), [(None, 4), (DecodeRunner, 1)])
def test_state_is_made_once_for_the_largest_captured_size(make_attending, cls, width):
    attention = Spy()
    options = {"cls": cls} if cls else {}
    make_attending(attention, multiple_of=3, **options).capture()
    assert attention.states == [(6, 6 * width)]


def test_a_mode_that_is_not_supported_is_refused(make_attending):
    with pytest.raises(ConfigError, match="Spy does not support TARGET_VERIFY") as caught:
        make_attending(Spy(modes=[ForwardMode.DECODE]))
    assert caught.value.field == "attention"
    make_attending(Spy(modes=[ForwardMode.DECODE]), cls=DecodeRunner)


def test_the_fill_value_reaches_the_pads(make_attending, make_batch):
    runner = make_attending(Spy())
    runner.capture()
    runner.replay(make_batch(3))
    assert runner.buffers.view(4).seq_lens[3:].tolist() == [7]
    assert runner.stage(2).seq_lens.tolist() == [7, 7]


def test_metadata_is_made_anew_for_each_warm_up_and_capture(make_attending, make_batch):
    attention = Spy()
    runner = make_attending(attention)
    runner.capture()
    assert [size for _, size, _ in attention.asked] == [4, 4, 2, 2, 1, 1]
    assert {mode for mode, _, _ in attention.asked} == {ForwardMode.TARGET_VERIFY}
    assert len({id(made) for _, _, made in attention.asked}) == 6
    runner.replay(make_batch(3))
    assert len(attention.asked) == 6
    runner.fall_back(make_batch(3))
    assert attention.asked[-1][1] == 3


@pytest.mark.parametrize("way", ["replay", "run", "run_padded", "fall_back"])
def test_metadata_is_of_the_batch_at_hand(make_attending, make_batch, expect, way):
    """Made in the graph after the refresh: lengths of live rows and of pads."""
    runner = make_attending(Spy())
    runner.capture()
    for seed in range(3):
        batch = make_batch(3, seed=seed)
        pads = 0 if way == "fall_back" else 7 + 4
        shift = batch.seq_lens.sum() + 3 * 4 + pads
        got = getattr(runner, way)(batch).hidden_states
        assert torch.equal(got, expect(batch).hidden_states + shift)


def test_without_a_backend_the_forward_finds_none(make_runner, make_batch, model):
    seen = []
    runner = make_runner(lambda inputs: seen.append(inputs.attention) or model(inputs))
    runner.capture()
    runner.fall_back(make_batch(2))
    assert seen == [None] * 7
    assert runner.buffers.view(2).seq_lens.eq(1).all()


def test_the_host_plans_before_each_replay(make_attending, make_batch, expect):
    attention = Planner()
    runner = make_attending(attention)
    record = runner.capture()
    assert record.modes[0].host_planned
    attention.planned.clear()
    batches = [make_batch(requests, seed=requests) for requests in (3, 1, 2)]
    for turn, batch in enumerate(batches, 1):
        pads = {1: 0, 2: 0, 3: 1}[batch.batch_size]
        got = runner.replay(batch).hidden_states
        lengths = batch.seq_lens.sum() + batch.batch_size * 4 + pads * 11
        assert torch.equal(got, expect(batch).hidden_states + lengths + turn)
    mode = ForwardMode.TARGET_VERIFY
    assert attention.planned == [(mode, b, p) for b, p in zip(batches, (4, 1, 2), strict=True)]
    runner.run_padded(batches[0], padded_batch_size=4)
    assert attention.planned[3:] == [(mode, batches[0], 4)]
    runner.replay(make_batch(0))
    assert len(attention.planned) == 4


def test_the_host_plans_before_each_warm_up_and_capture(make_attending):
    """A kernel without a plan has nothing to capture; the batch is one of pads."""
    attention = Planner()
    runner = make_attending(attention)
    attention.error = RuntimeError("no room for a plan")
    with pytest.raises(RuntimeError, match="no room"):
        runner.capture()
    assert runner.status == "planned"
    attention.error = None
    runner.capture()
    planned = [(batch.batch_size, padded) for _, batch, padded in attention.planned]
    assert planned == [(size, size) for size in (4, 4, 2, 2, 1, 1)]
    assert all(batch.seq_lens.eq(7).all() for _, batch, _ in attention.planned)


def test_a_backend_that_plans_needs_whole_batches(make_attending):
    runner = make_attending(Planner())
    runner.capture()
    with pytest.raises(ReplayError, match=r"plans each batch on the host.*Use replay\(batch\)"):
        runner.stage(2)


def test_a_plan_that_fails_loses_nothing(make_attending, make_batch, assert_in_step):
    attention = Planner()
    runner = make_attending(attention)
    runner.capture()
    for seed in range(5):
        attention.error = RuntimeError("no room for a plan")
        with pytest.raises(RuntimeError, match="no room"):
            runner.replay(make_batch(3, seed=seed))
        attention.error = None
        batch = make_batch(2, seed=seed)
        runner.replay(batch)
        assert runner.buffers.view(2).input_ids.tolist() == batch.input_ids.tolist()
        assert_in_step(runner)


def test_others_are_recorded_as_planned_on_the_device(make_attending):
    assert not make_attending(Spy()).capture().modes[0].host_planned
