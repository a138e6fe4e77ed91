"""NVIDIA/Megatron-LM#5975: a buffer between two graphs is allocated anew after a capture."""

from graphbugs.frame import capture, new_graph, numbered, tensor

KIND = "replaced buffer"


class Layer:
    def __init__(self):
        self.given, self.result, self.graph = None, tensor(4, 4, value=0), new_graph()

    def capture(self, given):
        self.given = given
        with capture(self.graph):
            self.result.copy_(self.given.relu() + 1)  # BUG


def program():
    first, second, hidden = Layer(), Layer(), numbered(4)
    first.capture(hidden)
    second.capture(first.result)
    for layer in (first, second):
        layer.graph.replay()
    earlier = second.given
    first.result = second.given = tensor(4, 4, value=0)  # the pool of buffers hands out another one
    for layer in (first, second):
        layer.graph.replay()
    del earlier
