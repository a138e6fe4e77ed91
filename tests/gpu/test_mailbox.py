"""Races of the mailbox: the host runs ahead, streams change, sources are freed early."""

import pytest
import torch

import graphkit as gk
from graphkit.buffers import ENTRIES

pytestmark = pytest.mark.gpu


def test_replays_ahead_of_the_device_are_all_correct(make_runner, make_batch, expected):
    runner = make_runner()
    runner.capture()
    kept = []
    torch.cuda._sleep(20_000_000)  # delays the device, so that the ring fills and the host waits
    for turn in range(2000):
        requests = (16, 3, 12, 1, 7)[turn % 5]
        output = runner.replay(make_batch(requests, turn))
        kept.append((requests, turn, output.hidden_states.clone()))
    for requests, turn, hidden in kept:
        assert torch.equal(hidden, expected(requests, turn)), f"replay {turn}"


def test_the_host_waits_while_every_entry_is_in_flight(make_runner, make_batch):
    runner = make_runner()
    runner.capture()
    batch = make_batch(3, 1)
    runner.replay(batch)
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)
    mailbox = runner.buffers.mailbox
    for _ in range(ENTRIES):
        runner.replay(batch)
    assert mailbox.sequence - int(mailbox.ring[0]) == ENTRIES, "the device should not have begun"
    runner.replay(batch)
    assert mailbox.sequence - int(mailbox.ring[0]) <= ENTRIES


def test_two_streams_are_ordered(make_runner, make_batch, expected):
    runner = make_runner()
    runner.capture()
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    kept = []
    for turn in range(400):
        requests = (16, 3, 4)[turn % 3]
        with torch.cuda.stream(streams[turn % 2]):
            if turn % 2:
                torch.cuda._sleep(200_000)
            output = runner.replay(make_batch(requests, turn), clone=True)
            kept.append((requests, turn, output.hidden_states))
    torch.cuda.synchronize()
    for requests, turn, hidden in kept:
        assert torch.equal(hidden, expected(requests, turn)), f"replay {turn}"


def test_two_runners_of_one_pool_are_ordered_across_streams(make_runner, make_batch, expected):
    backend = gk.CudaBackend()
    runners = [make_runner(backend=backend), make_runner(backend=backend)]
    for runner in runners:
        runner.capture()
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    kept = []
    for turn in range(200):
        with torch.cuda.stream(streams[turn % 2]):
            output = runners[turn % 2].replay(make_batch(16, turn), clone=True)
            kept.append((turn, output.hidden_states))
    torch.cuda.synchronize()
    for turn, hidden in kept:
        assert torch.equal(hidden, expected(16, turn))


def test_a_source_may_be_freed_right_after_replay(make_runner, make_batch, expected):
    runner = make_runner()
    runner.capture()
    elsewhere, here = torch.cuda.Stream(), torch.cuda.Stream()
    for turn in range(100):
        with torch.cuda.stream(elsewhere):
            batch = make_batch(16, turn)
        here.wait_stream(elsewhere)
        with torch.cuda.stream(here):
            torch.cuda._sleep(100_000)
            output = runner.replay(batch, clone=True)
        del batch
        with torch.cuda.stream(elsewhere):  # reuses the memory of the source if it was freed
            torch.full((16 * 4, 64), -1.0, device="cuda")
        torch.cuda.synchronize()
        assert torch.equal(output.hidden_states, expected(16, turn))


def test_a_host_array_may_be_overwritten_right_after_replay(make_runner, make_batch, expected):
    runner = make_runner()
    runner.capture()
    batch = make_batch(16, 3)
    torch.cuda._sleep(50_000_000)
    output = runner.replay(batch, clone=True)
    batch.input_ids[:] = -1
    batch.positions[:] = -1
    assert torch.equal(output.hidden_states, expected(16, 3))


def test_large_host_fields_and_strided_device_tensors(make_runner, make_batch, expected):
    runner = make_runner()
    runner.capture()
    on_host = make_batch(5, 2, embeds=torch.full((20, 64), 2.0))
    assert torch.equal(runner.replay(on_host).hidden_states, expected(5, 2))
    strided = make_batch(5, 2, embeds=torch.full((64, 20), 2.0, device="cuda").t())
    with pytest.raises(gk.InputError, match=r"'input_embeds' has strides .* Pass \.contiguous"):
        runner.replay(strided)
    assert torch.equal(runner.replay(make_batch(5, 9)).hidden_states, expected(5, 9))
