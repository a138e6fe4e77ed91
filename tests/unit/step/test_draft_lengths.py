"""Times of draft lengths."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from graphkit.engine.step.draft_lengths import DraftLengths

CPU = torch.device("cpu")


def step(depth):
    """A step of 0 or 3 drafts whose plain steps catch up together once in ``depth`` steps."""
    lengths = [SimpleNamespace(max_path=path, drafts=path - 1) for path in (1, 4)]
    return SimpleNamespace(
        pending_catch_up=depth and SimpleNamespace(depth=depth),
        by_length=lengths,
        variants=[*lengths, *(lengths[:1] if depth else [])],
        context=SimpleNamespace(spec=SimpleNamespace(topk=1)),
    )


@pytest.mark.parametrize(
    ("depth", "measured", "times"),
    [(None, [2.0, 7.0], [2.0, 7.0]), (4, [2.0, 7.0, 6.0], [3.0, 7.0])],
    ids=["catches up in every step", "catches up in every fourth step"],
)
def test_plain_steps_bear_their_share_of_the_catch_up(depth, measured, times):
    behind = None if depth is None else torch.zeros(3, dtype=torch.int32)
    chooser = DraftLengths(step(depth), [1, 2], behind, CPU)
    chooser.set_times([measured, [2 * time for time in measured]])
    assert chooser.times.tolist() == [times, [2 * time for time in times]]
