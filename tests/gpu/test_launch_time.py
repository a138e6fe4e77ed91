"""Launch times of graphs, and streams in use. No test asserts on a time."""

from __future__ import annotations

import pytest
import torch

import graphkit as gk
from graphkit.audit import AuditLog
from graphkit.audit.launch import audit_launch, audit_streams
from graphkit.graphs.driver import checked, runtime
from graphkit.graphs.streams import restore_fast_replays, streams_in_use

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(runtime() is None, reason="needs cuda-bindings"),
]


@pytest.fixture
def device():
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture
def new_stream():
    """Creates streams that torch does not know yet, and destroys them."""
    bindings, made = runtime(), []

    def create():
        made.append(checked(bindings.cudaStreamCreateWithFlags(bindings.cudaStreamNonBlocking))[0])
        return torch.cuda.ExternalStream(int(made[-1]))

    yield create
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    for each in made:
        checked(bindings.cudaStreamDestroy(each))


def audit(runner):
    log = AuditLog()
    audit_launch(None, runner, log)
    assert {each.severity for each in log.findings} <= {"note"}
    return log


def test_every_size_of_a_line_is_measured(make_runner):
    runner = make_runner()
    runner.capture()
    log = audit(runner)
    assert [check.batch_size for check in log.checks] == list(runner.table)
    for check in log.checks:
        nodes = len(runner.inspect(check.batch_size).nodes)
        assert check.text.startswith(f"{nodes} nodes launch in ")
        assert "fork" not in check.text


def test_forks_are_counted(make_runner):
    side = torch.cuda.Stream()

    def forked(inputs):
        main = torch.cuda.current_stream()
        hidden = inputs.input_embeds + 1
        side.wait_stream(main)
        with torch.cuda.stream(side):
            other = hidden.sin()
        hidden = hidden.cos()
        main.wait_stream(side)
        return gk.ForwardOutput(next_token_logits=(hidden + other)[:, :32], hidden_states=hidden)

    runner = make_runner(forked, batch_sizes=[16])
    runner.capture()
    (check,) = audit(runner).checks
    assert check.text.endswith("; 1 fork and 1 join")


def test_the_runner_replays_as_before(make_runner, make_batch, expected, forward):
    count = torch.zeros(1, device="cuda")

    def counting(inputs):
        count.add_(1)
        return forward(inputs)

    runner = make_runner(counting, mutable_state={"count": count})
    runner.capture()
    runner.replay(make_batch(3, 1))
    audit(runner)
    assert count.item() == 1
    for mark in range(1, 7):  # more than the mailbox has entries
        got = runner.replay(make_batch(3, mark)).hidden_states
        assert torch.equal(got, expected(3, mark))


def test_a_stream_is_in_use_while_it_holds_memory(device, new_stream):
    stream = new_stream()
    assert stream.cuda_stream not in streams_in_use(device)
    with torch.cuda.stream(stream):
        held = torch.zeros(1000, device=device)
        assert stream.cuda_stream in streams_in_use(device)
    stream.synchronize()
    assert stream.cuda_stream in streams_in_use(device)
    del held
    torch.cuda.empty_cache()
    assert stream.cuda_stream not in streams_in_use(device)


def test_the_audit_counts_the_streams(device, new_stream):
    stream = new_stream()
    with torch.cuda.stream(stream):
        held = torch.zeros(1000, device=device)
    log = AuditLog()
    audit_streams(device, log)
    (check,) = log.checks
    assert check.text.startswith(f"{len(streams_in_use(device))} streams in use; ")
    assert not log.findings
    del held


def test_the_context_of_the_process_stays_current(device):
    from cuda.bindings import driver

    graph = torch.cuda.CUDAGraph()
    x = torch.zeros(4, device=device)
    with torch.cuda.graph(graph):
        x += 1
    (before,) = checked(driver.cuCtxGetCurrent())
    restore_fast_replays(device)
    (after,) = checked(driver.cuCtxGetCurrent())
    graph.replay()
    assert int(after) == int(before)
    assert x.tolist() == [1.0] * 4
