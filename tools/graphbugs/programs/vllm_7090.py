"""vllm-project/vllm#7090: the graph is chosen by the batch size before drafts expand it."""

from graphbugs.frame import capture, new_graph, numbered, tensor

import graphkit as gk

KIND = "wrong graph"


class Target:
    def __init__(self, sizes):
        self.rows, self.out, self.live = numbered(8), tensor(8, 4, value=0), 0
        self.graphs = {size: self.captured(size) for size in sizes}

    def captured(self, size):
        graph, rows = new_graph(), self.rows[:size]
        with capture(graph):
            self.out[:size] = rows + 1
        inputs = {"rows": (rows, 0, None)}
        gk.foreign.register(
            graph, name=f"target {size}", inputs=inputs, live_rows=lambda: self.live
        )
        return graph

    def score(self, batch_size, num_drafts):
        self.live = batch_size * (num_drafts + 1)
        self.graphs[batch_size].replay()


def program():
    target = Target((1, 2, 4, 8))
    target.score(2, 0)
    target.score(2, 3)
