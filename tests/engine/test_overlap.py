"""v2 launches a step before it reads the previous one's tokens, and no launch waits."""

from __future__ import annotations

from itertools import pairwise
from traceback import extract_stack

import pytest
import torch
from torch.overrides import TorchFunctionMode

from engine_runs import finish, outputs
from graphkit.engine import EagleDrafter, SamplingParams
from graphkit.engine.schedule import PendingReport, Schedule
from graphkit.errors import ReplayError
from graphkit.graphs.capture_rules import HOST_READS, CaptureRulesMode

DRAFTING = ["EAGLE", "MULTI_LAYER_EAGLE", "STANDALONE", "NGRAM", "NONE"]


@pytest.fixture
def log(monkeypatch):
    """Events in order: ``sent`` and ``delivered`` of each verify, and each ``extended``."""
    happened = []
    send, book, extend = PendingReport.send.__func__, PendingReport.deliver, EagleDrafter.extend

    def sending(cls, requests, report, body):
        results = send(cls, requests, report, body)
        happened.append(("sent", id(results)))
        kept.append(results)
        return results

    def delivering(results):
        happened.append(("delivered", id(results)))
        return book(results)

    def extending(drafter, verified):
        happened.append(("extended", id(kept[-1])))
        extend(drafter, verified)

    kept = []
    monkeypatch.setattr(PendingReport, "send", classmethod(sending))
    monkeypatch.setattr(PendingReport, "deliver", delivering)
    monkeypatch.setattr(EagleDrafter, "extend", extending)
    return happened


def in_order(log):
    """The same with the results numbered as they were sent."""
    number = {which: i for i, (_, which) in enumerate(e for e in log if e[0] == "sent")}
    return [(what, number[which]) for what, which in log]


@pytest.mark.parametrize("topk", [1, 2], ids=["chain", "tree"])
def test_v2_launches_a_whole_step_before_it_reads_the_last_one(make_engine, task, log, topk):
    engine = make_engine(topk=topk, generation="v2")
    engine.generate([task.prompts[1]], SamplingParams(max_new_tokens=13))
    events = in_order(log)
    launches = sum(what == "extended" for what, _ in events)
    assert launches > 4
    expected = [("sent", 0)]  # the prompt's first token
    for step in range(1, launches + 1):
        expected += [("sent", step), ("extended", step), ("delivered", step - 1)]
    assert events == [*expected, ("delivered", launches)]


def test_v1_reads_every_step_before_the_next(make_engine, task, log):
    engine = make_engine(generation="v1")
    engine.generate([task.prompts[1]], SamplingParams(max_new_tokens=13))
    events = in_order(log)
    assert [what for what, _ in events] == ["sent", "delivered"] * (len(events) // 2)
    assert all(a == b for (_, a), (_, b) in list(pairwise(events))[::2])


def test_v2_returns_the_tokens_of_a_step_in_the_next_call(make_engine, task):
    engine = make_engine(generation="v2")
    request = engine.submit(task.prompts[1], SamplingParams(max_new_tokens=13))
    assert engine.step() == [(request, task.expected[1][:1])]
    returned = [events for _ in range(20) if (events := engine.step())]
    assert [token for events in returned for _, tokens in events for token in tokens] == (
        task.expected[1][1:]
    )


@pytest.mark.parametrize("generation", ["v1", "v2", "v3"])
@pytest.mark.parametrize("tokens", [1, 2, 9, 16, 17, 40])
def test_no_step_runs_behind_the_last_token(make_engine, task, tokens, generation):
    """The host knows that each step generates a token."""
    engine = make_engine(algorithm="NONE", generation=generation, steps_per_launch=8)
    engine.capture()
    before = engine.runners[0].stats.replays
    requests = engine.generate(task.prompts[:2], SamplingParams(max_new_tokens=tokens))
    assert [len(request.output_ids) for request in requests] == [tokens] * 2
    assert engine.runners[0].stats.replays - before == tokens - 1


@pytest.fixture
def only_cpu(device):
    if device == "cuda":
        pytest.skip("tests/gpu/test_engine.py uses the synchronisation checks of CUDA")


class HostReadsMode(TorchFunctionMode):
    """Records the lines that read a tensor's values on the host."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in HOST_READS:
            ours = [f for f in extract_stack() if "site-packages" not in f.filename][-2]
            self.lines.append(f"{HOST_READS[func]} at {ours.filename}:{ours.lineno}")
        return func(*args, **(kwargs or {}))


@pytest.mark.slow
@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("topk", [1, 2], ids=["chain", "tree"])
@pytest.mark.parametrize("algorithm", DRAFTING)
@pytest.mark.usefixtures("only_cpu")
def test_no_line_of_a_launch_reads_the_device(
    make_engine, task, monkeypatch, algorithm, topk, captured
):
    launch, reads = Schedule._enqueue, HostReadsMode()

    def watched(*args, **options):
        with reads, CaptureRulesMode():
            launch(*args)

    monkeypatch.setattr(Schedule, "_enqueue", watched)
    engine = make_engine(algorithm, topk=topk, generation="v2", max_batch_size=2)
    if captured:
        engine.capture()
    requests = engine.generate(task.prompts[:2], SamplingParams(max_new_tokens=6))
    assert outputs(requests) == [t[:6] for t in task.expected[:2]]
    # Buffers and the checks of a draft tree read CPU tensors as host data. They do not read
    # tensors of a CUDA device.
    ours = [line for line in reads.lines if "/buffers/" not in line]
    assert [line for line in ours if "/step/tree_checks.py" not in line] == []


@pytest.mark.usefixtures("only_cpu")
def test_the_recorder_of_reads_sees_v1_read(make_engine, task, monkeypatch):
    """Shows that the test above can fail."""
    reads, refused = HostReadsMode(), CaptureRulesMode()
    advance = Schedule.advance

    def watched(*args, **options):
        with reads, refused:
            return advance(*args, **options)

    monkeypatch.setattr(Schedule, "advance", watched)
    engine = make_engine(generation="v1")
    engine.generate(task.prompts[:1], SamplingParams(max_new_tokens=6))
    assert any("tolist" in line for line in reads.lines)


@pytest.mark.slow
@pytest.mark.parametrize("generation", ["v1", "v2"])
@pytest.mark.parametrize("topk", [1, 2], ids=["chain", "tree"])
@pytest.mark.parametrize("algorithm", DRAFTING)
def test_every_result_is_read_once(make_engine, task, algorithm, topk, generation):
    engine = make_engine(algorithm, topk=topk, generation=generation, debug=True, max_batch_size=3)
    requests = engine.generate(task.prompts[:6], SamplingParams(max_new_tokens=6))
    assert outputs(requests) == [t[:6] for t in task.expected[:6]]


class ReadsTwice(EagleDrafter):
    """Reads its candidates twice."""

    def draft(self, req_pool_indices, seq_lens, bonus_tokens):
        self._context.future_map.resolve("topk_index", req_pool_indices)
        return super().draft(req_pool_indices, seq_lens, bonus_tokens)


def test_debug_detects_a_drafter_that_reads_twice(make_engine, task):
    engine = make_engine(drafter=ReadsTwice, debug=True)
    engine.submit(task.prompts[0])
    with pytest.raises(ReplayError, match="'topk_index' were already resolved"):
        engine.step()
    unchecked = make_engine(drafter=ReadsTwice)
    request = unchecked.generate(task.prompts[:1], SamplingParams(max_new_tokens=4))[0]
    assert request.output_ids == task.expected[0][:4]


@pytest.mark.slow
@pytest.mark.parametrize("topk", [1, 2], ids=["chain", "tree"])
@pytest.mark.parametrize("algorithm", ["EAGLE", "MULTI_LAYER_EAGLE", "NGRAM"])
def test_capture_between_steps_does_not_change_the_output(make_engine, task, algorithm, topk):
    engine = make_engine(algorithm, topk=topk, batch_sizes=[8])
    requests = [engine.submit(p, SamplingParams(max_new_tokens=13)) for p in task.prompts[:8]]
    engine.step()
    engine.step()
    state = torch.random.get_rng_state()
    engine.capture()
    assert torch.equal(torch.random.get_rng_state(), state)
    finish(engine)
    assert outputs(requests) == task.expected[:8]
