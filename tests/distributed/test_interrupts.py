"""^C at every line of an agreement: the rank leaves the group, or its state is consistent."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

import pytest
import torch.distributed as dist

import graphkit as gk
import graphkit.distributed
import graphkit.runners
from rank_steps import batch, captured

PLACES = tuple(
    str(Path(room.__file__).resolve().parent) for room in (graphkit.distributed, graphkit.runners)
)


@cache
def is_traced(filename):
    return str(Path(filename).resolve()).startswith(PLACES)


@pytest.fixture
def group():
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield gk.RankGroup(time_limit=20.0)
    dist.destroy_process_group()


def interrupted(call, line):
    """Raise KeyboardInterrupt at a line of a call; return whether the call has that line."""
    seen = 0

    def trace(frame, event, _argument):
        nonlocal seen
        if not is_traced(frame.f_code.co_filename):
            return None
        if event == "line":
            seen += 1
            if seen == line:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except (KeyboardInterrupt, gk.RankError):
        pass
    finally:
        sys.settrace(before)
    return seen >= line


@pytest.mark.parametrize("kind", ["run", "idle"])
def test_an_interrupted_rank_leaves_or_is_consistent(group, kind):
    runner = captured(group)
    calls = {"run": lambda: runner.run(batch(1)), "idle": group.idle}
    line, left = 1, 0
    while True:
        before = runner.stats.replays, group.waits
        if not interrupted(calls[kind], line):
            break
        if group.is_lost:
            left += 1
            failure = group.store.failure("failure")
            assert failure.text == "rank 0 left the group after KeyboardInterrupt"
            # A group cannot be used after a failure; this test resets it.
            group.store._store.delete_key("graphkit/failure")
            group._failure, group._has_raised = None, False
        else:  # before or after the part in which other ranks rely on this one
            done = (runner.stats.replays, group.waits)
            assert done in (before, (before[0] + (kind == "run"), before[1] + 1))
        assert group._topic is None
        line += 1
    assert left > 10, "most lines are between the agreement and its replay"
    runner.run(batch(1))
    runner.close()
