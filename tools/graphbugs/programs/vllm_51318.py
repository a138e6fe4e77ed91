"""vllm-project/vllm#51318: rows of the block table are found with the stride of the capture."""

from graphbugs.frame import capture, new_graph, numbered, tensor

KIND = "frozen value"


class BlockTable:
    def __init__(self, num_rows, width):
        self.num_rows, self.width = num_rows, width
        self.flat = numbered(1, 64).flatten()


class Runner:
    def __init__(self):
        self.table, self.out = BlockTable(4, 4), tensor(4, value=0)

    def forward(self):
        table = self.table
        first = table.flat[:: table.width][:4]  # BUG
        self.out.copy_(first)


def program():
    runner, graph = Runner(), new_graph()
    runner.forward()
    with capture(graph):
        runner.forward()
    graph.replay()
    runner.table.width = 8
    graph.replay()
