"""Switches replay the first operations of recorded graphs."""

from __future__ import annotations

import torch

from graphkit.audit.node_switches import switches
from graphkit.graphs import GraphSequence, RecorderBackend


def test_the_first_operations_and_those_that_always_run_are_replayed():
    done = torch.zeros(5)

    def count(*places):
        for place in places:
            done[place].add_(1)

    backend = RecorderBackend()
    graphs = [backend.capture(lambda: count(0, 1, 2)), backend.capture(lambda: count(3, 4))]
    with switches(GraphSequence(graphs), ()) as switched:
        for kept, always_on, expected in (
            (5, (), [1, 1, 1, 1, 1]),
            (2, (), [1, 1, 0, 0, 0]),
            (1, (2, 4), [1, 0, 1, 0, 1]),
            (0, (), [0, 0, 0, 0, 0]),
        ):
            done.zero_()
            switched.keep_first(kept, always_on)
            switched.graph.replay()
            assert done.tolist() == expected
        assert switched.graph.output is graphs[-1].output
    graphs[0].replay()
    assert done.tolist() == [1, 1, 1, 0, 0], "the graph itself does not change"
