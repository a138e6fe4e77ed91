"""Replays operation by operation find the first operation with different results."""

from __future__ import annotations

import itertools

import pytest
import torch

from graphkit.audit.shadow.first_results import written_tensors
from graphkit.graphs import RecorderBackend

HIDDEN = 8


@torch.library.custom_op("shadow_test::turn", mutates_args=())
def turn(rows: torch.Tensor) -> torch.Tensor:
    """Return a different number at each call."""
    return torch.full_like(rows, next(_turns))


_turns = itertools.count()


def test_nondeterministic_results_are_ignored(capture, batch_of, watched):
    table = {"order": torch.arange(HIDDEN)}

    def mix(model, hidden, inputs):
        turn(hidden)
        return hidden[:, table["order"]]

    runner, _ = capture(mix)
    table["order"] = torch.arange(HIDDEN).flip(0)
    (finding,) = watched(runner, [batch_of(3)], bisect=True).findings
    assert finding.kernel == "index"


def test_uninitialised_results_are_ignored(capture):
    graph = RecorderBackend().capture(lambda: torch.empty(5) + torch.zeros(5))
    assert [len(list(written_tensors(op))) for op in graph.ops] == [0, 1, 1]


@pytest.mark.usefixtures("unseen_numbers")
def test_every_run_of_a_bisection_starts_from_the_same_state(capture, batch_of, watched, storing):
    table = {"order": torch.arange(HIDDEN)}
    runner, _ = capture(
        lambda model, hidden, inputs: storing(model, hidden, inputs)[:, table["order"]]
    )
    table["order"] = torch.arange(HIDDEN).flip(0)
    (finding,) = watched(runner, [batch_of(3)], bisect=True).findings
    assert finding.kernel == "index"
    assert finding.source.endswith("in <lambda>")


@pytest.mark.usefixtures("unseen_numbers")
def test_writes_in_place_are_compared(capture, batch_of, watched):
    table = {"order": torch.arange(4)}

    def mix(model, hidden, inputs):
        made = torch.zeros(4, HIDDEN)
        made[table["order"]] = hidden[:4]  # a tensor in a list, and only a write in place
        return hidden + made[0]

    runner, _ = capture(mix)
    table["order"] = torch.arange(4).flip(0)
    (finding,) = watched(runner, [batch_of(3)], bisect=True).findings
    assert finding.kernel == "index_put_"
