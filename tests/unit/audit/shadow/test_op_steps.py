"""Recorded graphs are run operation by operation to find the first that makes something else."""

from __future__ import annotations

import itertools

import torch

from graphkit.audit.shadow.op_steps import written
from graphkit.graphs import RecorderBackend

HIDDEN = 8


@torch.library.custom_op("shadow_test::turn", mutates_args=())
def turn(rows: torch.Tensor) -> torch.Tensor:
    """Another number at each call."""
    return torch.full_like(rows, next(_turns))


_turns = itertools.count()


def test_results_that_are_never_the_same_are_passed_over(capture, batch_of, watched):
    table = {"order": torch.arange(HIDDEN)}

    def mix(model, hidden, inputs):
        turn(hidden)
        return hidden[:, table["order"]]

    runner, _ = capture(mix)
    table["order"] = torch.arange(HIDDEN).flip(0)
    (finding,) = watched(runner, [batch_of(3)], bisect=True).findings
    assert finding.kernel == "index"


def test_results_that_nobody_has_set_are_not_looked_at(capture):
    graph = RecorderBackend().capture(lambda: torch.empty(5) + torch.zeros(5))
    assert [len(list(written(op))) for op in graph.ops] == [0, 1, 1]


def test_every_run_of_a_bisection_begins_with_the_same_state(capture, batch_of, watched, storing):
    table = {"order": torch.arange(HIDDEN)}
    runner, _ = capture(
        lambda model, hidden, inputs: storing(model, hidden, inputs)[:, table["order"]]
    )
    table["order"] = torch.arange(HIDDEN).flip(0)
    (finding,) = watched(runner, [batch_of(3)], bisect=True).findings
    assert finding.kernel == "index"
    assert finding.source.endswith("in <lambda>")


def test_what_writes_in_place_is_looked_at(capture, batch_of, watched):
    table = {"order": torch.arange(4)}

    def mix(model, hidden, inputs):
        made = torch.zeros(4, HIDDEN)
        made[table["order"]] = hidden[:4]  # a tensor in a list, and nothing but a write in place
        return hidden + made[0]

    runner, _ = capture(mix)
    table["order"] = torch.arange(4).flip(0)
    (finding,) = watched(runner, [batch_of(3)], bisect=True).findings
    assert finding.kernel == "index_put_"
