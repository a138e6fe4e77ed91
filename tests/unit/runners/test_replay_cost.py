"""The work of a replay on the host, as Python calls: more of them make every replay slower."""

from __future__ import annotations

import sys

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
