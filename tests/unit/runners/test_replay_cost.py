"""The work of a replay on the host, as Python calls: more of them make every replay slower."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch

import graphkit as gk
from graphkit.buffers import ENTRIES
from graphkit.runners import RUNNERS

ROOMS = ("graphkit.runners", "graphkit.buffers")
VOCAB, HIDDEN = 50, 8
SIZES = gk.BufferSizes(4, 64, HIDDEN, VOCAB, torch.float32)
SPEC = gk.SpecConfig("EAGLE", 3, 1, 4)
CALLS = {
    gk.ForwardMode.DECODE: 10,
    gk.ForwardMode.TARGET_VERIFY: 10,
    gk.ForwardMode.DRAFT: 15,
    gk.ForwardMode.DRAFT_EXTEND_V2: 23,
    gk.ForwardMode.DRAFT_EXTEND: 31,
}
"""Most calls of Python functions per replay, without the launch itself."""


def forward(inputs):
    rows = torch.nn.functional.one_hot(inputs.input_ids, VOCAB).float()
    return gk.ForwardOutput(next_token_logits=rows, hidden_states=rows[:, :HIDDEN])


@pytest.mark.parametrize("mode", CALLS)
def test_a_replay_makes_few_calls(mode, monkeypatch):
    with RUNNERS[mode](forward, spec=SPEC, sizes=SIZES, batch_sizes=[2], device="cpu") as runner:
        runner.capture()
        batch = runner.sample_batch(2)
        for _ in range(ENTRIES):  # the writers of a ragged batch are made once per entry
            runner.replay(batch)
        for graph in runner.graphs.values():
            monkeypatch.setattr(graph, "replay", lambda: None)
        monkeypatch.setattr(runner, "_replayer", runner.make_replayer(runner.graphs))
        runner.replay(batch)  # the first one of a size prepares the others
        calls = []

        def count(frame, event, _argument):
            if event == "call" and frame.f_globals["__name__"].startswith(ROOMS):
                calls.append(frame.f_code.co_name)

        before = sys.getprofile()
        sys.setprofile(count)
        try:
            runner.replay(batch)
        finally:
            sys.setprofile(before)
        runner.buffers.mailbox.rewind()
    assert 0 < len(calls) <= CALLS[mode], calls


def test_a_capture_prepares_nothing_per_live_size():
    """Plans and writers are made at the first replay of a live size."""

    def made(most):
        calls = []

        def count(frame, event, _argument):
            if event == "call" and frame.f_globals["__name__"].startswith(ROOMS):
                calls.append(frame.f_code.co_name)

        sizes = replace(SIZES, max_batch_size=most)
        options = {"spec": SPEC, "sizes": sizes, "batch_sizes": [most], "device": "cpu"}
        with gk.DecodeRunner(forward, **options) as runner:
            runner.capture()
            before = sys.getprofile()
            sys.setprofile(count)
            try:
                replayer = runner.make_replayer(runner.graphs)
            finally:
                sys.setprofile(before)
            assert replayer.plans == {}
            for size in (1, most, 1):
                runner.replay(runner.sample_batch(size))
            assert len(runner._replayer.plans) == 2
        return len(calls)

    assert made(4) == made(64)
