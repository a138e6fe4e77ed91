"""pytorch/pytorch#170646: an input of a graph is not kept alive until its replay."""

import torch
from graphbugs.frame import capture, device, new_graph, tensor

KIND = "freed memory"
NEEDS = "cuda"


def captured(out):
    given = torch.full((16, 4), 3.0, device=device)
    graph = new_graph()
    with capture(graph):
        out.copy_(given * 2)  # BUG
    return graph


def program():
    out = tensor(16, 4, value=0)
    graph = captured(out)
    other = torch.full((16, 4), 5.0, device=device)
    graph.replay()
    del other
