"""Requests from many threads and from asyncio join one engine, end, and leave nothing behind."""

from __future__ import annotations

import asyncio
import gc
import math
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

import pytest

import graphkit as gk
from engine_target import engine_target

LONG = gk.SamplingParams(max_new_tokens=60)
GENERATIONS = pytest.mark.parametrize("generation", ["v1", "v2", "v3"])


class Letters:
    """Decodes token 0 to a, 1 to b and so on."""

    def decode(self, ids):
        return "".join(chr(ord("a") + token) for token in ids)


@pytest.fixture
def engine(request):
    generation = getattr(request, "param", None)
    target = engine_target(generation=generation, slots=200)
    with target.engine(batch_sizes=[1, 3], device="cpu", backend=None) as engine:
        yield engine
        assert engine.memory.held_slots == 0
        assert not engine.has_work


@pytest.fixture
def thread(engine):
    with gk.EngineThread(engine, Letters()) as thread:
        yield thread
        thread.drain()
        assert not thread._streams
        assert thread._num_joining == 0


class Blocking:
    """A matcher that keeps the engine in a step until it is released."""

    def __init__(self):
        self.entered, self.release = threading.Event(), threading.Event()

    def fill_next_token_bitmask(self, bitmask, index):
        bitmask[index] = -1
        if threading.current_thread().name == "graphkit engine":
            self.entered.set()
            self.release.wait(60)

    def accept_token(self, token):
        return True

    def rollback(self, count):
        pass

    def is_terminated(self):
        return False


def expected(prompt, count):
    tokens = [prompt[-1]]
    while len(tokens) <= count:
        tokens.append((5 * tokens[-1] + 3) % 16)
    return tokens[1:]


def collect(stream):
    for _ in stream:
        pass
    return stream


@pytest.mark.slow
@GENERATIONS
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_threads_get_the_tokens_and_text_of_their_requests(generation, device):
    target = engine_target(device, generation=generation)
    with target.engine(batch_sizes=[1, 3], device=device, backend=None) as engine:
        engine.capture()
        with gk.EngineThread(engine, Letters()) as thread, ThreadPoolExecutor(8) as pool:
            params = gk.SamplingParams(max_new_tokens=20)
            prompts = [[1 + number % 9] for number in range(40)]
            streams = list(pool.map(lambda ids: collect(thread.submit(ids, params)), prompts))
            stats = thread.call(lambda engine: engine.stats)
        assert [stream.token_ids for stream in streams] == [expected(ids, 20) for ids in prompts]
        assert streams[0].text == Letters().decode(streams[0].token_ids)
        assert stats.prompt_tokens == 40
        assert stats.finished == {gk.FinishReason.LENGTH: 40}
        histograms = stats.time_to_first_token, stats.latency, stats.queue_time
        assert [histogram.counts.total() for histogram in histograms] == [40, 40, 40]
        assert stats.inter_token_latency.counts.total() >= 40
        assert stats.latency.mean >= stats.time_to_first_token.mean >= stats.queue_time.mean > 0
        assert engine.memory.held_slots == 0


def test_asyncio_reads_many_streams_at_once(thread):
    async def read(token):
        async with thread.submit([token], LONG) as stream:
            outputs = [output async for output in stream]
        assert "".join(output.text for output in outputs) == stream.text
        return stream.token_ids

    async def run():
        return await asyncio.gather(*(read(token) for token in range(1, 13)))

    assert asyncio.run(run()) == [expected([token], 60) for token in range(1, 13)]


def test_a_request_has_its_times(thread):
    request = collect(thread.submit([1], LONG)).request
    times = (
        request.submitted_at, request.admitted_at, request.first_token_at, request.last_token_at,
        request.finished_at,
    )  # fmt: skip
    assert list(times) == sorted(times)


def test_a_stop_string_ends_the_text_before_it(thread):
    text = Letters().decode(expected([1], 60))
    stream = collect(thread.submit([1], LONG, stop=["never", text[5:8]]))
    assert stream.text == text[:5]
    assert stream.request.finish_reason is gk.FinishReason.STOP_STRING


@pytest.mark.parametrize("engine", ["v1", "v2", "v3"], indirect=True)
def test_a_stop_string_is_the_reason_of_a_request_whose_last_step_went_on(engine, thread):
    """A launch of several steps returns all tokens of a short request at once."""
    for length in (4, 6, 12):
        stop = Letters().decode(expected([1], 4)[2:])
        stream = collect(thread.submit([1], gk.SamplingParams(max_new_tokens=length), stop=[stop]))
        assert stream.text == Letters().decode(expected([1], 2))
        assert stream.request.finish_reason is gk.FinishReason.STOP_STRING
    stats = thread.call(lambda engine: engine.stats)
    assert {reason: count for reason, count in stats.finished.items() if count} == {
        gk.FinishReason.STOP_STRING: 3
    }


def test_a_stop_token_is_not_part_of_the_text(thread):
    tokens = expected([1], 4)
    params = gk.SamplingParams(max_new_tokens=60, stop_token_ids=[tokens[-1]])
    stream = collect(thread.submit([1], params))
    assert (stream.token_ids, stream.text) == (tokens, Letters().decode(tokens[:-1]))
    assert stream.request.finish_reason is gk.FinishReason.STOP


def test_log_probabilities_arrive_with_their_tokens(thread):
    stream = thread.submit([1], gk.SamplingParams(max_new_tokens=20, logprobs=True))
    outputs = list(stream)
    assert [len(output.logprobs) for output in outputs] == [len(o.token_ids) for o in outputs]
    assert [*chain(*(output.logprobs for output in outputs))] == stream.request.logprobs


@pytest.fixture
def blocked():
    """Return a thread whose engine stays in a step, and what lets it go on."""
    target, matcher = engine_target(generation="v1"), Blocking()
    options = {"batch_sizes": [1, 3], "device": "cpu", "backend": None, "structured_output": True}
    with target.engine(**options) as engine, gk.EngineThread(engine, max_waiting=2) as thread:
        stream = thread.submit([1], LONG, matcher=matcher)
        matcher.entered.wait(60)
        yield thread, stream, matcher.release
        matcher.release.set()
        stream.abort()
        thread.drain()
        assert engine.stats.running == engine.stats.waiting == engine.memory.held_slots == 0


def test_the_queue_has_a_limit(blocked):
    thread, _, release = blocked
    waiting = [thread.submit([2], LONG), thread.submit([3], LONG)]
    with pytest.raises(gk.QueueFullError, match="2 requests wait, and max_waiting is 2"):
        thread.submit([4], LONG)
    release.set()
    assert [collect(stream).token_ids[0] for stream in waiting] == [13, 2]
    collect(thread.submit([4], LONG))


def test_a_deadline_ends_requests_that_wait_and_that_run(blocked):
    thread, _, release = blocked
    late = thread.submit([2], LONG, timeout_s=1e-9)
    endless = thread.submit([3], LONG, timeout_s=math.inf)
    release.set()
    assert collect(late).token_ids == []
    assert late.request.finish_reason is gk.FinishReason.DEADLINE
    assert len(collect(endless).token_ids) == 60


def test_a_matcher_belongs_to_one_request_before_the_engine_has_it(blocked):
    thread, _, release = blocked
    matcher = Blocking()
    first = thread.submit([2], LONG, matcher=matcher)
    with pytest.raises(gk.InputError, match="belongs to another request"):
        thread.submit([3], LONG, matcher=matcher)
    matcher.release.set()
    release.set()
    assert len(collect(first).token_ids) == 60


@pytest.mark.slow
@GENERATIONS
def test_aborted_requests_end_and_others_go_on(generation):
    target = engine_target(generation=generation)
    with target.engine(batch_sizes=[1, 3], device="cpu", backend=None) as engine:
        engine.capture()
        with gk.EngineThread(engine) as thread:
            streams = [thread.submit([1 + number % 9], LONG) for number in range(30)]
            for stream in streams[::3]:
                stream.abort()
                stream.abort()
            tokens = [collect(stream).token_ids for stream in streams]
            stats = thread.call(lambda engine: engine.stats)
    kept = [number for number in range(30) if number % 3]
    assert all(tokens[number] == expected([1 + number % 9], 60) for number in kept)
    assert stats.finished[gk.FinishReason.LENGTH] >= len(kept)
    assert stats.finished.total() == 30
    assert stats.running == stats.waiting == 0
    assert engine.memory.held_slots == 0


def test_a_reader_that_is_cancelled_ends_its_request(engine):
    requests = []

    async def run(thread):
        async def read():
            async with thread.submit([1], LONG) as stream:
                requests.append(stream.request)
                async for _ in stream:
                    await asyncio.sleep(60)

        task = asyncio.create_task(read())
        while not (requests and requests[0].output_ids):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    with gk.EngineThread(engine) as thread:
        asyncio.run(run(thread))
        assert thread.drain()
    assert {request.finish_reason for request in requests} <= {
        gk.FinishReason.ABORTED,
        gk.FinishReason.LENGTH,  # it was as fast as the reader
    }


def test_drain_refuses_new_requests_and_waits_for_the_others(engine):
    with gk.EngineThread(engine) as thread:
        streams = [thread.submit([token], LONG) for token in range(1, 9)]
        assert thread.drain()
        with pytest.raises(gk.ReplayError, match="the EngineThread drains"):
            thread.submit([1])
        assert thread.call(lambda engine: engine.stats.running) == 0
        assert all(len(collect(stream).token_ids) == 60 for stream in streams)
    with pytest.raises(gk.ReplayError, match="the EngineThread is closed"):
        thread.call(lambda engine: engine.stats)


@pytest.mark.parametrize("limit", [10**400, math.inf, None])
def test_drain_waits_for_any_time(engine, limit):
    with gk.EngineThread(engine) as thread:
        stream = thread.submit([1], LONG)
        assert thread.drain(limit)
        assert stream.request.finish_reason is gk.FinishReason.LENGTH


def test_drain_gives_up_after_its_time(blocked):
    thread, stream, release = blocked
    assert not thread.drain(0.001)
    release.set()
    assert thread.drain()
    assert len(collect(stream).token_ids) == 60


def test_close_aborts_all_requests(blocked):
    thread, stream, release = blocked
    waiting = thread.submit([2], LONG)
    closing = threading.Thread(target=thread.close)
    closing.start()
    release.set()
    closing.join()
    assert waiting.request.finish_reason is gk.FinishReason.ABORTED
    assert collect(waiting).token_ids == []
    assert stream.request.is_finished


class Failing(Blocking):
    def fill_next_token_bitmask(self, bitmask, index):
        bitmask[index] = -1

    def accept_token(self, token):
        raise ValueError("a defect of the matcher")


def test_an_error_of_a_request_is_raised_by_its_stream_alone():
    target = engine_target(generation="v1")
    options = {"batch_sizes": [1, 3], "device": "cpu", "backend": None, "structured_output": True}
    with target.engine(**options) as engine, gk.EngineThread(engine) as thread:
        for _ in range(4):
            failing, other = thread.submit([1], matcher=Failing()), thread.submit([2], LONG)
            with pytest.raises(ValueError, match="a defect of the matcher"):
                collect(failing)
            assert len(collect(other).token_ids) == 60
        alone = thread.submit([1], matcher=Failing())
        with pytest.raises(ValueError, match="a defect of the matcher"):
            collect(alone)
        stats = thread.call(lambda engine: engine.stats)
    assert stats.finished == {gk.FinishReason.FAILED: 5, gk.FinishReason.LENGTH: 4}


class Unreadable(Letters):
    """Raises an exception for token 2, which follows token 3."""

    def decode(self, ids):
        if 2 in ids:
            raise IndexError("token 2 is out of range")
        return super().decode(ids)


def test_an_error_of_the_tokenizer_is_raised_by_the_stream_of_its_text_alone(engine):
    four = gk.SamplingParams(max_new_tokens=4)
    with gk.EngineThread(engine, Unreadable()) as thread:
        for params in (LONG, four):
            failing, other = thread.submit([3], params), thread.submit([4], four)
            with pytest.raises(IndexError, match="token 2 is out of range"):
                collect(failing)
            assert failing.request.is_finished
            assert collect(other).token_ids == expected([4], 4)


def test_an_exit_in_a_matcher_or_a_call_leaves_no_reader_waiting():
    class Exiting(Failing):
        def accept_token(self, token):
            sys.exit("a defect of the matcher")

    target = engine_target(generation="v1")
    options = {"batch_sizes": [1, 3], "device": "cpu", "backend": None, "structured_output": True}
    with target.engine(**options) as engine, gk.EngineThread(engine) as thread:
        with pytest.raises(SystemExit):
            thread.call(lambda _: sys.exit("a defect of the function"))
        assert collect(thread.submit([2], LONG)).token_ids == expected([2], 60)
        streams = [thread.submit([2], LONG), thread.submit([1], matcher=Exiting())]
        for stream in streams:
            with pytest.raises(gk.ReplayError, match="has failed: SystemExit"):
                collect(stream)


def test_a_step_that_fails_once_is_repeated(engine, monkeypatch):
    step, errors = engine._batching.schedule.advance, [RuntimeError("once")]

    def advance(*arguments, **options):
        if errors:
            raise errors.pop()
        step(*arguments, **options)

    monkeypatch.setattr(engine._batching.schedule, "advance", advance)
    with gk.EngineThread(engine) as thread:
        assert collect(thread.submit([1], LONG)).token_ids == expected([1], 60)


def test_a_step_that_fails_again_ends_all_streams_and_calls(engine, monkeypatch):
    def advance(*_, **__):
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(engine._batching.schedule, "advance", advance)
    with gk.EngineThread(engine) as thread:
        streams = [thread.submit([token], LONG) for token in range(1, 6)]
        for stream in streams:
            with pytest.raises(gk.ReplayError, match="has failed: RuntimeError") as raised:
                collect(stream)
            assert isinstance(raised.value.__cause__, RuntimeError)
        with pytest.raises(gk.ReplayError, match="the device is lost"):
            thread.submit([1])
        with pytest.raises(gk.ReplayError, match="the device is lost"):
            thread.call(lambda engine: None)
    engine.close()


def test_calls_return_results_and_errors(thread):
    assert thread.call(lambda engine: engine.context_limit) > 0
    with pytest.raises(ZeroDivisionError):
        thread.call(lambda _: 1 / 0)
    assert thread.call(lambda _: thread.call(lambda engine: engine.max_path)) == 4
    for wait in (thread.close, thread.drain):
        with pytest.raises(gk.ReplayError, match=r"Call (close|drain) on another thread"):
            thread.call(lambda _, wait=wait: wait())
    assert collect(thread.submit([1], LONG)).token_ids == expected([1], 60)


def test_nothing_of_a_request_stays(thread):
    streams = [thread.submit([1], LONG, timeout_s=3600) for _ in range(3)]
    requests = [weakref.ref(collect(stream).request) for stream in streams]
    collect(thread.submit([1], LONG))  # a reader of the last one
    thread.call(lambda _: None)
    del streams
    gc.collect()
    assert [request() for request in requests] == [None] * 3


def test_refusals(engine, thread):
    for stop in ("ab", [3], [""]):
        with pytest.raises(gk.ConfigError, match="stop"):
            thread.submit([1], stop=stop)
    for timeout in (0, -1, math.nan, "1"):
        with pytest.raises(gk.InputError, match="timeout_s must be a positive number of seconds"):
            thread.submit([1], timeout_s=timeout)
    for timeout in (-1, math.nan, "1"):
        with pytest.raises(gk.InputError, match="timeout_s must be a number of seconds of at leas"):
            thread.drain(timeout)
    for timeout in (10**400, math.inf):  # longer than a thread can wait for
        assert collect(thread.submit([1], LONG, timeout_s=timeout)).token_ids
    with pytest.raises(gk.InputError, match="the prompt is empty"):
        thread.submit([])
    with pytest.raises(gk.ConfigError, match="engine must be a SpeculativeEngine"):
        gk.EngineThread(None)
    for limit in (0, True, 1.5):
        with pytest.raises(gk.ConfigError, match="max_waiting must be an int above 0"):
            gk.EngineThread(engine, max_waiting=limit)
    with gk.EngineThread(engine) as plain, pytest.raises(gk.InputError, match="has no tokenizer"):
        plain.submit([1], stop=["a"])


def test_only_reasons_of_a_caller_end_a_request(engine):
    request = engine.submit([1])
    with pytest.raises(gk.InputError, match="expected a FinishReason of ABORTED, DEADLINE, STOP"):
        engine.abort(request, gk.FinishReason.LENGTH)
    engine.abort(request, gk.FinishReason.DEADLINE)
    engine.abort(request, gk.FinishReason.STOP_STRING)
    assert request.finish_reason is gk.FinishReason.DEADLINE
    engine.step()
