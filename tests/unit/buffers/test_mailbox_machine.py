"""Host and device around one mailbox, in any order of events, against a plain queue."""

from __future__ import annotations

import weakref
from collections import deque

import pytest
import torch
from hypothesis import settings, strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test as run_machine,
)

from graphkit.buffers import ENTRIES, Axis, InputBuffers, declare, mailbox
from graphkit.errors import InputError

CPU = torch.device("cpu")
DIM = {"a": 0, "b": 1, "c": 0}
"""The dimension that counts a field's rows."""


class Ring(RuleBasedStateMachine):
    """The queue holds what the device has still to see."""

    def __init__(self, capacity, inputs_type):
        super().__init__()
        self.inputs_type, self.queue, self.seed = inputs_type, deque(), 0
        self.buffers = InputBuffers(
            capacity, CPU, inputs_type=inputs_type, check_device=self.device_steps
        )
        for size in range(1, 5):
            self.buffers.prepare(size)

    def device_steps(self):
        """Run the oldest launch and look at what it brought."""
        padded, expected, refs = self.queue.popleft()
        assert all(ref() is not None for ref in refs), "dropped before it was read"
        self.buffers.refresh(padded)
        view = self.buffers.view(padded)
        for name, rows in expected.items():
            head, tail = getattr(view, name).tensor_split([rows.shape[DIM[name]]], DIM[name])
            assert torch.equal(head, rows), name
            assert not tail.any(), name

    def batch(self, live):
        self.seed += 1
        torch.manual_seed(self.seed)
        return {
            "a": torch.randint(1, 99, (live,)),
            "b": torch.randint(1, 99, (2, live), dtype=torch.int32),
            "c": torch.rand(live * 2, 3) + 1,
        }

    @rule(live=st.integers(1, 4), spare=st.integers(0, 3))
    def post(self, live, spare):
        """With four in flight, claim waits, and the device goes on meanwhile."""
        rows = self.batch(live)
        entry = self.buffers.mailbox.claim()
        kept = self.buffers.writer(entry, live).write(self.inputs_type(**rows))
        expected = {name: tensor.clone() for name, tensor in rows.items()}
        refs = [weakref.ref(tensor) for tensor in kept]
        assert len(refs) == 1
        self.buffers.mailbox.post(entry, live, live * 2)
        self.buffers.mailbox.commit(kept)
        self.queue.append((min(live + spare, 4), expected, refs))

    @rule(live=st.integers(1, 4), at=st.sampled_from("abc"))
    def post_nonsense(self, live, at):
        rows = self.batch(live) | {at: torch.zeros(9)}
        entry = self.buffers.mailbox.claim()
        with pytest.raises(InputError):
            self.buffers.writer(entry, live).write(self.inputs_type(**rows))

    @rule()
    def post_idle(self):
        with self.buffers.posted():
            pass
        self.queue.append((4, self.batch(0), []))

    @precondition(lambda self: self.queue)
    @rule()
    def step(self):
        self.device_steps()

    @rule()
    def rewind(self):
        self.buffers.mailbox.rewind()
        self.queue.clear()

    @invariant()
    def in_step(self):
        done, fault = self.buffers.mailbox.ring[:2].tolist()
        assert fault == 0
        assert self.buffers.mailbox.sequence - done == len(self.queue) <= ENTRIES


@pytest.mark.slow
def test_every_batch_is_seen_once_in_order_and_intact(make_capacity, make_inputs, monkeypatch):
    monkeypatch.setattr(mailbox, "_CHECK_EVERY", 1)  # wait less
    inputs_type = make_inputs(
        a=declare(Axis.REQUEST, torch.int64, "from the entry"),
        b=declare(Axis.REQUEST, torch.int32, "the same, in two segments", lead=2),
        c=declare(Axis.TOKEN, torch.float32, "by address", row=(3,), by_address=True),
    )
    capacity = make_capacity(4, 2)
    limits = settings(max_examples=40, stateful_step_count=30, deadline=None)
    run_machine(lambda: Ring(capacity, inputs_type), settings=limits)
