"""Switches replay the first operations of recorded graphs."""

from __future__ import annotations

import torch

from graphkit.audit.node_switches import switches
from graphkit.graphs import GraphSequence, RecorderBackend, Stage
from graphkit.records import Node


def test_the_first_operations_and_the_refresh_are_replayed():
    done = torch.zeros(5)

    def count(*places):
        for place in places:
            done[place].add_(1)

    backend = RecorderBackend()
    graphs = [backend.capture(lambda: count(0, 1, 2)), backend.capture(lambda: count(3, 4))]
    for refresh, kept, expected in (
        ((), 5, [1, 1, 1, 1, 1]),
        ((), 2, [1, 1, 0, 0, 0]),
        ((2, 4), 1, [1, 0, 1, 0, 1]),
        ((), 0, [0, 0, 0, 0, 0]),
    ):
        nodes = [
            Node(index=i, kind="op", name="add", short_name="add", module=Stage.REFRESH)
            for i in refresh
        ]
        with switches(GraphSequence(graphs), nodes, backend.wait_for_device) as switched:
            done.zero_()
            switched.replay_first(kept, lambda graph: graph.replay())
            assert done.tolist() == expected
            assert switched.output is graphs[-1].output
    graphs[0].replay()
    assert done.tolist() == [1, 1, 1, 0, 0], "the graph itself does not change"
