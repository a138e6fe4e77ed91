"""State that each replay updates in place."""

from graphbugs.frame import capture, new_graph, numbered, tensor

import graphkit as gk


class Counter:
    def __init__(self):
        self.total, self.rows, self.out = tensor(1, 4, value=0), numbered(4), tensor(4, 4, value=0)

    def forward(self):
        self.total.add_(self.rows.mean(0, keepdim=True))
        return self.rows + self.total


def program():
    counter, graph = Counter(), new_graph()
    counter.forward()
    with capture(graph):
        counter.out.copy_(counter.forward())
    inputs = {"rows": (counter.rows, 0, None)}
    gk.foreign.register(graph, body=counter.forward, inputs=inputs, outputs=counter.out)
    for number in range(4):
        counter.rows.fill_(number)
        graph.replay()
