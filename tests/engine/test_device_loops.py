"""Generation v3: loops of steps on the device give the tokens of plain decoding."""

from __future__ import annotations

import dataclasses
from itertools import chain

import numpy as np
import pytest
import torch

from engine_runs import finish, refuses, submit_all
from graphkit.engine import EagleDrafter, FinishReason, SamplingParams
from graphkit.engine.attention import PagedAttention, SdpaAttention
from graphkit.engine.step import SpecStepInputs, SpecStepRunner, StepStream, step_stream
from graphkit.errors import ConfigError, InputError, ReplayError
from graphkit.ops.loop_layout import LoopEnd, RequestEnd
from graphkit.spec import ForwardMode


def runner_of(engine, **changes):
    """Return another runner of the step of an engine, with other options."""
    step = engine.runners[0].spec_step
    return SpecStepRunner.from_step(step, dataclasses.replace(step.context.options, **changes))


@pytest.mark.slow
@pytest.mark.parametrize("topk", [1, 2], ids=["chain", "tree"])
def test_sampled_tokens_equal_those_of_v1(make_engine, task, topk):
    """Beside greedy requests, in other batches and with a stop token."""
    texts = []
    for options in ({"generation": "v1"}, {"generation": "v3", "steps_per_launch": 5}):
        engine = make_engine(topk=topk, batch_sizes=[4, 5], max_batch_size=5, **options)
        engine.capture()
        requests = submit_all(
            engine,
            task.prompts[:8],
            lambda i: SamplingParams(
                max_new_tokens=9,
                temperature=0.8 * (i % 3 > 0),
                seed=i,
                stop_token_ids=range(10 * i, 10 * i + 3),
            ),
        )
        finish(engine)
        texts.append([(request.output_ids, request.finish_reason) for request in requests])
    assert texts[0] == texts[1]
    assert {reason for _, reason in texts[0]} == {FinishReason.STOP, FinishReason.LENGTH}


def test_the_next_launch_precedes_the_reading_of_this_one(make_engine, task, monkeypatch):
    """Unless a request waits, whose turn a further launch would delay."""
    engine = make_engine(batch_sizes=[2], max_batch_size=2, steps_per_launch=2)
    engine.capture()
    events, launch, available = [], SpecStepRunner.launch, StepStream.available

    def launched(runner, *args, **options):
        events.append("launch")
        return launch(runner, *args, **options)

    def read(stream):
        events.append("read")
        return available(stream)

    monkeypatch.setattr(SpecStepRunner, "launch", launched)
    monkeypatch.setattr(StepStream, "available", read)
    requests = [engine.submit(prompt, SamplingParams(max_new_tokens=16)) for prompt in task.prompts]
    engine.step()
    assert events == ["launch", "read"], "the third request waits"
    for request in requests[1:]:
        engine.abort(request)
    events.clear()
    finish(engine)
    assert "launch launch read" in " ".join(events)
    expected = task.expected[0]
    assert requests[0].output_ids[: len(expected)] == expected


def test_v3_is_the_default_and_says_why_not(make_engine, caplog):
    assert make_engine().generation == "v3"
    assert not caplog.records

    class Hosted(EagleDrafter):
        eager_reason = "the drafter asks a grammar"

    engine = make_engine(drafter=Hosted)
    assert engine.generation == "v2"
    assert engine.plan.reason == "a chain; v3 cannot run: the drafter asks a grammar"
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("graphkit.engine.settings", "WARNING")
    assert "no device loops: the drafter asks a grammar. It runs" in record.getMessage()
    with refuses(ConfigError, "generation", "'v3' cannot run: the drafter asks a grammar"):
        make_engine(drafter=Hosted, generation="v3")


def test_a_runner_without_loops_says_why_when_it_is_captured(make_engine, caplog):
    (runner,) = make_engine(batch_sizes=[2], max_batch_size=2).runners
    runner.no_loop_reason = "cuda-bindings are not installed"
    runner.capture()
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("graphkit.engine.step.spec_step_runner", "WARNING")
    assert record.getMessage() == "STEP runs no device loops: cuda-bindings are not installed."


def test_a_backend_that_plans_on_the_host_runs_in_v2(make_engine, monkeypatch):
    monkeypatch.setattr(SdpaAttention, "before_replay", lambda *_: None, raising=False)
    if make_engine.device == "cuda":
        pytest.skip("plans with the CPU's backend")
    engine = make_engine()
    assert engine.generation == "v2"
    assert "attention backend of TARGET_VERIFY plans each batch on the host" in engine.plan.reason


def test_a_backend_without_graphs_of_a_mode_runs_in_v2(make_engine, task, monkeypatch):
    """v3 would capture the mode that the backend excludes."""
    supports = PagedAttention.supports
    monkeypatch.setattr(
        PagedAttention,
        "supports",
        lambda self, mode: mode is not ForwardMode.DRAFT_EXTEND_V2 and supports(self, mode),
    )
    engine = make_engine(batch_sizes=[8])
    assert engine.generation == "v2"
    assert "does not support DRAFT_EXTEND_V2 graphs" in engine.plan.reason
    engine.capture()
    (request,) = engine.generate(task.prompts[:1], SamplingParams(max_new_tokens=6))
    assert request.output_ids == task.expected[0][:6]
    with refuses(ConfigError, "generation", r"'v3' cannot run: .* DRAFT_EXTEND_V2 graphs"):
        make_engine(generation="v3")


def test_closing_during_a_loop_keeps_the_tokens(make_engine, task):
    engine = make_engine(generation="v3", steps_per_launch=64, batch_sizes=[8])
    engine.capture()
    requests = submit_all(engine, task.prompts[:8], SamplingParams(max_new_tokens=13))
    engine.step()
    engine.close()
    for request, expected in zip(requests, task.expected[:8], strict=True):
        assert request.output_ids == expected[: len(request.output_ids)]
        assert request.output_ids


@pytest.fixture(scope="module")
def captured():
    """Runners that stay open for the module."""
    return {}


class TestRunner:
    """``SpecStepRunner`` without an engine."""

    ROWS = (1, 2, 3)

    @pytest.fixture
    def runner(self, make_engine, task, captured):
        if not captured:
            engine = make_engine(generation="v3", batch_sizes=[1, 2, 4], max_batch_size=4)
            runner = runner_of(engine, ring_entries=6)
            runner.capture()
            captured["runner"] = runner
        runner = captured["runner"]
        context = runner.spec_step.context
        slots = torch.arange(96, device=context.device)
        for row in self.ROWS:
            context.req_to_token[row] = (row * 96 - 95 + slots).int()
            sampling = SamplingParams(max_new_tokens=13)
            first = runner.admit(row, task.prompts[row], sampling)
            assert first.shape == (1, 7)
            assert int(first[0, 5]) == task.expected[row][0]
        yield runner
        runner.release(self.ROWS)

    def tokens(self, steps):
        """Return the new tokens of each row."""
        found = {row: [] for row in self.ROWS}
        for step in steps:
            for each in step.requests:
                found[each.req_pool_index] += each.tokens
        return found

    def run_to_end(self, runner):
        """Return the steps until all requests have ended, of one launch unless the ring is full."""
        with runner.launch(self.ROWS, max_steps=50) as stream:
            steps = list(stream)
        assert next(stream, None) is None
        if stream.end is LoopEnd.RING_FULL and runner.device.type == "cuda":
            return steps + self.run_to_end(runner)
        assert stream.end is LoopEnd.IDLE
        return steps

    def assert_ended(self, stream, runner, end):
        """A device may fill the ring, or end all requests, before a busy host stops it."""
        others = () if runner.device.type == "cpu" else (LoopEnd.RING_FULL, LoopEnd.IDLE)
        assert stream.end in (end, *others)

    def rest(self, task):
        return {row: task.expected[row][1:13] for row in self.ROWS}

    @pytest.mark.slow
    def test_a_second_capture_is_refused_and_changes_nothing(self, runner, task):
        with pytest.raises(ReplayError, match="needs a planned runner, but this one is captured"):
            runner.capture()
        assert self.tokens(runner.launch(self.ROWS, max_steps=50)) == self.rest(task)

    def test_replay_runs_one_step(self, runner, task):
        report = runner.replay(SpecStepInputs(req_pool_indices=torch.tensor([2, 1]))).report
        new = report[0, 2]
        assert report[:, 0].tolist() == [2, 1]
        assert report[0, 5 : 5 + new].tolist() == task.expected[2][1 : 1 + new]

    def test_a_loop_runs_until_all_requests_have_ended(self, runner, task):
        steps = self.run_to_end(runner)
        assert self.tokens(steps) == self.rest(task)
        assert {step.batch_size for step in steps} <= {1, 2, 4}
        ends = [each.end for step in steps for each in step.requests]
        assert ends.count(RequestEnd.LENGTH) == 3

    def test_the_number_of_steps_ends_it(self, runner, task):
        first = list(runner.launch(self.ROWS, max_steps=2))
        assert len(first) == 2
        second = list(runner.launch(self.ROWS, max_steps=50))
        assert self.tokens(first + second) == self.rest(task)

    def test_the_end_of_a_watched_request_ends_it(self, runner, task):
        runner.release([2])
        runner.admit(2, task.prompts[2], SamplingParams(max_new_tokens=3))
        stream = runner.launch(self.ROWS, max_steps=50, until=[2])
        steps = list(stream)
        assert stream.end is LoopEnd.REQUEST
        assert steps[-1].requests[1].end is RequestEnd.LENGTH
        assert self.tokens(steps)[2] == task.expected[2][1:3]

    def test_the_stop_word_ends_it(self, runner, task):
        stream = runner.launch(self.ROWS, max_steps=50)
        steps = [next(stream)]
        stream.stop()
        steps += stream
        self.assert_ended(stream, runner, LoopEnd.STOPPED)
        assert len(steps) < 6 or runner.device.type == "cuda"
        steps += runner.launch(self.ROWS, max_steps=50)
        assert self.tokens(steps) == self.rest(task)

    def test_a_full_ring_ends_it_and_loses_nothing(self, runner, task):
        stream = runner.launch(self.ROWS, max_steps=50)
        runner._loops._running.wait()
        steps = list(stream)
        assert stream.end in (LoopEnd.RING_FULL, LoopEnd.IDLE)
        assert len(steps) <= 6
        steps += runner.launch(self.ROWS, max_steps=50)
        assert self.tokens(steps) == self.rest(task)

    def test_an_exception_in_the_reader_ends_it_and_loses_nothing(self, runner, task):
        steps = []

        def read(stream):
            with stream:
                for step in stream:
                    steps.append(step)
                    raise ValueError("reader")

        stream = runner.launch(self.ROWS, max_steps=50)
        with pytest.raises(ValueError, match="reader"):
            read(stream)
        steps += stream
        self.assert_ended(stream, runner, LoopEnd.STOPPED)
        steps += runner.launch(self.ROWS, max_steps=50)
        assert self.tokens(steps) == self.rest(task)

    def test_an_interrupt_while_waiting_ends_it(self, runner, task, monkeypatch):
        stream = runner.launch(self.ROWS, max_steps=50)
        with monkeypatch.context() as patch:
            patch.setattr(runner._loops._reader, "wait", interrupt)
            with pytest.raises(KeyboardInterrupt):
                next(stream)
        steps = list(stream)
        self.assert_ended(stream, runner, LoopEnd.STOPPED)
        steps += runner.launch(self.ROWS, max_steps=50)
        assert self.tokens(steps) == self.rest(task)

    def test_an_interrupt_in_a_launch_ends_it(self, runner, task, monkeypatch):
        """Its caller has no stream of it. Later launches are not taken for it."""
        loops = runner._loops
        graph = loops._captured.loops[True].graph

        def replay_and_interrupt():
            type(graph).replay(graph)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(graph, "replay", replay_and_interrupt)
            with pytest.raises(KeyboardInterrupt):
                runner.launch(self.ROWS, max_steps=50)
        found = self.tokens(self.run_to_end(runner))
        for row, tokens in self.rest(task).items():
            lost = len(tokens) - len(found[row])
            assert found[row] == tokens[lost:]
            assert lost >= 1
            if runner.device.type == "cpu":  # a device may run another step before it is stopped
                assert lost <= runner.spec_step.max_path

    def test_steps_that_no_stream_can_read_are_dropped(self, runner, task):
        runner.launch(self.ROWS, max_steps=2)
        steps = list(runner.launch(self.ROWS, max_steps=4))
        steps += runner.launch(self.ROWS, max_steps=50)
        found = self.tokens(steps)
        for row, tokens in self.rest(task).items():
            assert len(found[row]) < len(tokens)
            assert found[row] == tokens[len(tokens) - len(found[row]) :]
        assert not runner._loops._reader._in_flight

    def test_available_steps_are_those_that_have_arrived(self, runner, task):
        stream, steps = runner.launch(self.ROWS, max_steps=50), []
        while stream.end is None:
            steps.append(list(stream.available()))
        assert all(steps)
        if runner.device.type == "cpu":  # the recorder runs one step per call
            assert {len(each) for each in steps} == {1}
        assert list(stream.available()) == []
        assert self.tokens(chain.from_iterable(steps)) == self.rest(task)

    def test_available_steps_include_all_of_a_loop_that_has_ended(self, runner):
        stream = runner.launch(self.ROWS, max_steps=3)
        runner._loops._running.wait()
        assert len(list(stream.available())) == 3
        assert stream.end is LoopEnd.STEPS

    def test_streams_may_be_read_in_any_order(self, runner, task):
        first = runner.launch(self.ROWS, max_steps=2)
        second = runner.launch(self.ROWS, max_steps=2)
        later = list(second)
        steps = [*first, *later, *runner.launch(self.ROWS, max_steps=50)]
        assert self.tokens(steps) == self.rest(task)

    def test_a_launch_that_may_find_the_ring_full_is_refused(self, runner, monkeypatch):
        stream = runner.launch(self.ROWS, max_steps=5)
        with monkeypatch.context() as patch:  # a fast device may have ended the first one
            patch.setattr(runner._loops._reader, "collect", lambda: None)
            with pytest.raises(ReplayError, match=r"launches of 5 steps have not been read to"):
                runner.launch(self.ROWS, max_steps=5)
        assert list(stream)

    @pytest.mark.slow
    def test_launches_that_are_not_read_are_bounded(self, runner, monkeypatch):
        """Few if their streams were dropped, whose tokens are lost; many if they can be read."""
        runner.stop_loops()
        launched = []

        def launch_all(most, keeps):
            launched.clear()
            for _ in range(most):
                launched.append(runner.launch(self.ROWS, max_steps=1))
                launched[-1] = launched[-1] if keeps else None

        refused = r"64 launches in a row have not been read, .* of {} .* call stop_loops"
        with pytest.raises(ReplayError, match=refused.format(64)):
            launch_all(80, keeps=False)
        assert len(launched) == 64
        runner.stop_loops()
        launch_all(80, keeps=True)
        assert list(launched[-1])
        monkeypatch.setattr(step_stream, "_MOST_UNREAD", 64)
        with pytest.raises(ReplayError, match=refused.format(0)):
            launch_all(80, keeps=True)
        assert list(launched[0]), "makes room for another"
        runner.launch(self.ROWS, max_steps=1)
        runner.stop_loops()
        for _ in range(80):
            runner.launch(self.ROWS, max_steps=1).stop()

    def test_a_replay_runs_after_the_loops_launched_before(self, runner, task):
        streams = [runner.launch(self.ROWS, max_steps=1) for _ in range(2)]
        batch = SpecStepInputs(req_pool_indices=torch.tensor(self.ROWS))
        replayed = runner.replay(batch, clone=True).report.tolist()
        streams.append(runner.launch(self.ROWS, max_steps=1))
        found = self.tokens(chain.from_iterable(streams[:2]))
        for line in replayed:
            found[line[0]] += line[5 : 5 + line[2]]
        for row, tokens in self.tokens(streams[2]).items():
            found[row] += tokens
            assert found[row] == self.rest(task)[row][: len(found[row])]
            assert len(found[row]) > 3

    def test_loops_of_both_kinds_run_in_the_order_of_their_launches(self, runner, task):
        sampled = SamplingParams(max_new_tokens=13, temperature=1e-6, seed=1)
        runner.release([2])
        runner.admit(2, task.prompts[2], sampled)
        streams = [
            runner.launch(rows, max_steps=1) for rows in ([1, 3], [2], [1, 3], [2], [1, 2, 3])
        ]
        streams.append(runner.launch(self.ROWS, max_steps=1))
        found = self.tokens(chain.from_iterable(streams))
        for row in self.ROWS:
            assert found[row] == self.rest(task)[row][: len(found[row])]
            assert found[row]

    def test_an_ended_request_runs_as_a_pad(self, runner):
        runner.release([2])
        kv = runner.spec_step.state.seq_lens.clone()
        steps = list(runner.launch(self.ROWS, max_steps=2))
        assert all(each.req_pool_index != 2 for step in steps for each in step.requests)
        assert runner.spec_step.state.seq_lens[2] == kv[2]
        assert runner.spec_step.state.seq_lens[0] == 1

    @pytest.mark.parametrize(
        ("rows", "options", "message"),
        [
            ([], {}, "expected a sequence of ints, at least one"),
            ([1, 1], {}, "expected distinct rows"),
            ([0, 1], {}, "expected distinct rows from 1 to 6: row 0 belongs to pads"),
            ([7], {}, r"req_pool_indices is \[7\], expected distinct rows from 1 to 6"),
            (["a"], {}, "expected a sequence of ints"),
            ([1.5], {}, "expected a sequence of ints"),
            ([[1], [1, 2]], {}, "expected a sequence of ints"),
            ([1], {"until": 1}, "until is 1, expected rows of the batch"),
            ([1], {"until": [[1]]}, r"until is \[\[1\]\], expected rows of the batch"),
            ([1], {"until": [2]}, r"until is \[2\], expected rows of the batch"),
        ],
    )
    def test_invalid_rows_are_refused(self, runner, rows, options, message):
        with pytest.raises(InputError, match=message):
            runner.launch(rows, max_steps=1, **options)

    @pytest.mark.parametrize(
        ("row", "prompt", "options", "field"),
        [
            (0, [1], {}, "req_pool_indices"),
            (-1, [1], {}, "req_pool_indices"),
            (7, [1], {}, "req_pool_indices"),
            ("a", [1], {}, "req_pool_indices"),
            (1, [], {}, "prompt_ids"),
            (1, "text", {}, "prompt_ids"),
            (1, [96], {}, "prompt_ids"),
            (1, [1] * 96, {}, "prompt_ids"),
            (1, [1] * 50, {"max_new_tokens": 46}, "max_new_tokens"),
            (1, [1], {"max_new_tokens": 0}, "max_new_tokens"),
            (1, [1], {"sampling": 0.5}, "sampling"),
            (1, [1], {"sampling": SamplingParams(stop_token_ids=[95, 96])}, "stop_token_ids"),
        ],
    )
    def test_an_invalid_admission_is_refused(self, runner, row, prompt, options, field):
        before = {name: each.clone() for name, each in runner.state.tensors().items()}
        with refuses((InputError, ConfigError), field):
            runner.admit(row, prompt, **options)
        for name, each in runner.state.tensors().items():
            assert torch.equal(each, before[name])

    def test_a_release_of_an_invalid_row_is_refused(self, runner):
        for rows in ([7], [0], [1, 1], [1.5], None, 5, "1", torch.tensor(1), [[1]]):
            with pytest.raises(InputError):
                runner.release(rows)
        for rows in ([], (), np.zeros(0, np.int64), np.zeros(0)):
            runner.release(rows)

    def test_an_invalid_number_of_steps_is_refused(self, runner):
        with pytest.raises(ConfigError, match="max_steps must be an int >= 1"):
            runner.launch([1], max_steps=0)


def interrupt(*_):
    raise KeyboardInterrupt


def test_a_greedy_runner_refuses_a_temperature(make_engine):
    engine = make_engine(generation="v3")
    runner = runner_of(engine, is_greedy=True)
    with pytest.raises(InputError, match=r"temperature 0\.5, but the runner was created with"):
        runner.admit(1, [1], SamplingParams(temperature=0.5))


def test_a_closed_runner_takes_no_requests(make_engine):
    runner = make_engine(generation="v3").runners[0]
    runner.close()
    before = {name: each.clone() for name, each in runner.state.tensors().items()}
    with pytest.raises(ReplayError, match="admit needs an open runner, but this one is closed"):
        runner.admit(1, [1])
    with pytest.raises(ReplayError, match="release needs an open runner, but this one is closed"):
        runner.release([1])
    assert all(torch.equal(each, before[name]) for name, each in runner.state.tensors().items())


def test_launch_needs_a_capture(make_engine):
    engine = make_engine(generation="v3")
    with pytest.raises(ReplayError, match="launch needs a captured runner"):
        engine.runners[0].launch([1], max_steps=1)


@pytest.mark.slow
def test_launches_that_are_not_read_run_one_after_the_other(make_engine, task):
    """Also more than the mailbox holds: a launch then waits for the oldest loop, which ends."""
    engine = make_engine(generation="v3", batch_sizes=[2], max_batch_size=2)
    with runner_of(engine, is_greedy=True) as runner:
        runner.capture()
        context, found = runner.spec_step.context, {}
        for row in (1, 2):
            slots = torch.arange(96, device=context.device)
            context.req_to_token[row] = (row * 96 - 95 + slots).int()
            runner.admit(row, task.prompts[row], SamplingParams(max_new_tokens=13))
            found[row] = []
        streams = [runner.launch([1, 2], max_steps=4) for _ in range(80)]
        for stream in reversed(streams):  # in any order
            for each in reversed([each for step in stream for each in step.requests]):
                found[each.req_pool_index][:0] = each.tokens
        assert found == {row: task.expected[row][1:13] for row in (1, 2)}
        assert {stream.end for stream in streams} == {LoopEnd.STEPS, LoopEnd.IDLE}
        assert len({stream.end for stream in streams[-70:]}) == 1


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
def test_live_sizes_of_loops_count_the_requests_of_each_step(make_engine, task, captured):
    engine = make_engine(generation="v3", batch_sizes=[4], max_batch_size=4)
    if captured:
        engine.capture()
    requests = engine.generate(task.prompts[:4], SamplingParams(max_new_tokens=9))
    stats = engine.runners[0].stats
    if not captured:
        assert stats.live_sizes == {}, "nothing was replayed"
        return
    # A loop that was launched before the host saw the last request end has a step of pads alone.
    longest = max(request.num_verifies for request in requests)
    assert longest <= sum(stats.live_sizes.values()) <= stats.replays
    took_part = sum(size * count for size, count in stats.live_sizes.items())
    assert took_part == sum(request.num_verifies for request in requests)
    assert stats.padded_rows == 4 * stats.replays - took_part
