"""Loops of the recorder run step by step, in the order of their launches."""

from __future__ import annotations

import gc
import weakref
from unittest.mock import Mock

import pytest
import torch

from graphkit.errors import ReplayError
from graphkit.graphs import RecorderBackend

STEPS = 3


class Looping:
    """A loop of three steps that counts them, and a graph that writes 9 to its log."""

    def __init__(self, backend):
        self.log, self.place = torch.zeros(64, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
        self.left, self.body = (torch.zeros(1, dtype=torch.int32) for _ in range(2))
        self.divisor = torch.ones(1, dtype=torch.int64)
        prologue = backend.capture(lambda: self.left.fill_(STEPS))
        body = backend.capture(self.step)
        self.replayed = backend.capture(lambda: self.append(9))
        self.loop = backend.loop(prologue, [body], self.left, self.body)
        self.log.zero_()
        self.place.zero_()

    def append(self, number):
        self.log.index_fill_(0, self.place, number)
        self.place.add_(1)

    def step(self):
        (self.place // self.divisor).sum()  # fails if it is 0
        self.append(1)
        self.left.sub_(1)

    @property
    def found(self):
        return self.log[: int(self.place)].tolist()


@pytest.fixture
def backend():
    return RecorderBackend()


@pytest.fixture
def looping(backend):
    return Looping(backend)


def test_a_poll_runs_one_step(looping):
    looping.loop.replay()
    assert looping.found == []
    for steps in (1, 2, 3, 3):
        looping.loop.poll()
        assert looping.found == [1] * steps


def test_a_later_launch_runs_when_the_first_has_ended(looping):
    looping.loop.replay()
    looping.loop.replay()
    for steps in range(1, 2 * STEPS + 1):
        looping.loop.poll()
        assert looping.found == [1] * steps
        assert int(looping.left) == STEPS - 1 - (steps - 1) % STEPS


@pytest.mark.parametrize(
    "act",
    [
        lambda backend, _: backend.capture(lambda: torch.ones(2)).replay(),
        lambda backend, _: backend.wait_for_replays(),
        lambda backend, _: backend.session().__enter__(),
        lambda _, looping: looping.loop.join(),
        lambda _, looping: looping.loop.wait(),
        lambda _, looping: looping.loop.close(),
    ],
    ids=["replay", "wait_for_replays", "session", "join", "wait", "close"],
)
def test_everything_else_of_the_backend_waits_for_the_loops(backend, looping, act):
    looping.loop.replay()
    looping.loop.replay()
    looping.loop.poll()
    act(backend, looping)
    assert looping.found == [1] * (2 * STEPS)


def test_a_check_of_the_device_advances_the_oldest_loop(backend, looping):
    backend.check_device()
    looping.loop.replay()
    backend.check_device()
    assert looping.found == [1]


def test_loops_of_other_backends_do_not_wait(looping):
    other = Looping(RecorderBackend())
    looping.loop.replay()
    other.loop.replay()
    other.replayed.replay()
    assert other.found == [1, 1, 1, 9]
    assert looping.found == []


def test_a_dropped_loop_does_not_run(backend):
    dropped, kept = Looping(backend), Looping(backend)
    dropped.loop.replay()
    kept.loop.replay()
    dropped.loop, loop = None, weakref.ref(dropped.loop)
    gc.collect()
    assert loop() is None
    kept.replayed.replay()
    assert dropped.found == []
    assert kept.found == [1, 1, 1, 9]


def test_every_wait_reports_a_step_that_failed_until_the_loop_is_closed(looping):
    looping.divisor.zero_()
    looping.loop.replay()
    for wait in (looping.loop.poll, looping.loop.wait, looping.replayed.replay, looping.loop.close):
        with pytest.raises(RuntimeError, match="ZeroDivision"):
            wait()
    looping.replayed.replay()
    assert looping.found == [9]


def test_an_interrupted_step_is_reported_until_the_loop_is_waited_for(looping, backend):
    """Launches of other loops go on."""
    other = Looping(backend)
    for loop in (looping.loop, looping.loop, other.loop):
        loop.replay()
    run_body, looping.loop.run_body = looping.loop.run_body, Mock(side_effect=KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        looping.loop.poll()
    looping.loop.run_body = run_body
    for wait in (looping.loop.poll, looping.replayed.replay, other.loop.poll):
        with pytest.raises(ReplayError, match=r"was interrupted.* Call stop_loops, release the"):
            wait()
    looping.loop.wait()
    assert (looping.found, other.found) == ([], [1, 1, 1])
    looping.loop.replay()
    looping.loop.wait()
    assert looping.found == [1, 1, 1]
