"""flashinfer-ai/flashinfer#4270: graphs are keyed by shapes, and strides are baked in."""

import torch
from graphbugs.frame import capture, new_graph, numbered, tensor

KIND = "frozen value"


class Layout:
    def __init__(self, row_stride):
        self.row_stride = row_stride


class Prefill:
    def __init__(self):
        self.graphs, self.buffer, self.out = {}, numbered(8, 8), tensor(4, 4, value=0)
        self.layout = Layout(8)

    def run(self, shape):
        if shape not in self.graphs:
            graph = new_graph()
            with capture(graph):
                rows = torch.as_strided(self.buffer, shape, (self.layout.row_stride, 1))  # BUG
                self.out.copy_(rows)
            self.graphs[shape] = graph
        self.graphs[shape].replay()


def program():
    prefill = Prefill()
    prefill.run((4, 4))
    prefill.layout = Layout(16)
    prefill.run((4, 4))
