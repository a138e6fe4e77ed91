"""A program has a graph for each length, and the length is in its key."""

from graphbugs.frame import capture, new_graph, numbered, tensor

keys, out = numbered(32), tensor(4, value=0)


class Decoder:
    def __init__(self):
        self.graphs, self.length = {}, 0

    def step(self, length):
        self.length = length
        if length not in self.graphs:
            graph = new_graph()
            with capture(graph):
                out.copy_(keys[: self.length].sum(0))
            self.graphs[length] = graph
        self.graphs[length].replay()


def program():
    decoder = Decoder()
    for length in (4, 8, 4, 8, 4):
        decoder.step(length)
