"""vllm-project/vllm#46324: graph sizes are no multiples of K + 1, so a request has too few rows."""

from graphbugs.frame import capture, new_graph, numbered, tensor

import graphkit as gk

KIND = "wrong graph"
NUM_DRAFTS, SIZES = 3, (2, 4, 6)


class Runner:
    def __init__(self):
        self.graphs, self.live = {}, 0
        self.rows, self.out = numbered(8), tensor(8, 4, value=0)
        for size in SIZES:
            self.graphs[size] = self.capture(size)

    def capture(self, size):
        graph, rows = new_graph(), self.rows[:size]
        with capture(graph):
            self.out[:size] = rows * 2
        inputs = {"rows": (rows, 0, None)}
        gk.foreign.register(
            graph, name=f"verify {size}", inputs=inputs, live_rows=lambda: self.live
        )
        return graph

    def verify(self, num_requests):
        self.live = num_requests * (NUM_DRAFTS + 1)
        size = max(size for size in SIZES if size <= self.live)
        self.graphs[size].replay()


def program():
    runner = Runner()
    for num_requests in (1, 2):
        runner.verify(num_requests)
