"""Counters of the host change at every step, and no operation gets them."""

from graphbugs.frame import capture, new_graph, numbered, tensor


class Engine:
    def __init__(self):
        self.steps, self.finished, self.width = 4, [], 4
        self.rows, self.out = numbered(4), tensor(4, 4, value=0)

    def forward(self):
        self.out[:, : self.width] = self.rows[:, : self.width].tanh()


def program():
    engine, graph = Engine(), new_graph()
    engine.forward()
    with capture(graph):
        engine.forward()
    for step in range(8):
        engine.steps += 1
        engine.finished.append(step)
        graph.replay()
