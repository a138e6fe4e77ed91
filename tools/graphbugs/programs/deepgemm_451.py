"""deepseek-ai/DeepGEMM#451: readiness tags of the last replay are accepted, and old results read.

The eager path resets the tags on the host between launches. The graph does not contain the reset.
"""

import torch
from graphbugs.frame import capture, is_capturing, new_graph, numbered, tensor

import graphkit as gk

KIND = "graph bug"
rows, out = numbered(4), tensor(4, 4, value=0)
ready, combined = tensor(4, 1, value=0), tensor(4, 4, value=0)


def combine():
    if not is_capturing():
        ready.zero_()  # BUG
    combined.copy_(torch.where(ready > 0, combined, rows))
    ready.fill_(1)
    return combined.clone()


def program():
    graph = new_graph()
    combine()
    with capture(graph):
        out.copy_(combine())
    gk.foreign.register(graph, body=combine, inputs={"rows": (rows, 0, None)}, outputs=out)
    for number in range(3):
        rows.fill_(number + 1.0)
        graph.replay()
