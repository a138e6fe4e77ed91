"""NVIDIA/TensorRT-LLM#16290: a workspace is allocated per forward, and its address baked."""

import torch
from graphbugs.frame import capture, device, new_graph, numbered, tensor

KIND = "freed memory"
NEEDS = "cuda"


class Attention:
    def __init__(self):
        self.rows, self.out, self.workspace = numbered(32), tensor(32, 4, value=0), None

    def prepare(self):
        self.workspace = torch.empty(32, 4, device=device)

    def forward(self):
        torch.mul(self.rows, 2, out=self.workspace)  # BUG
        self.out.copy_(self.workspace)


def program():
    attention, graph = Attention(), new_graph()
    attention.prepare()
    attention.forward()
    with capture(graph):
        attention.forward()
    graph.replay()
    attention.workspace = None
    other = tensor(32, 4, value=9)
    graph.replay()
    del other
