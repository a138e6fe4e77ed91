"""vllm-project/vllm#53520: the padded drafter overwrites rows that others still read.

Pad rows are stored to a slot that a live request reads, so that its output depends on what they
hold.
"""

import torch
from graphbugs.frame import capture, device, new_graph, numbered, tensor

import graphkit as gk

KIND = "leaking pad row"
rows, out, shared = numbered(4), tensor(4, 4, value=0), tensor(8, 4, value=0)
slots, read = torch.tensor([[1, 2, 3, 4], [1, 2, 4, 4]], device=device)


def body():
    shared.index_copy_(0, slots, rows)
    return shared.index_select(0, read)  # BUG


def program():
    graph = new_graph()
    body()
    with capture(graph):
        out.copy_(body())
    gk.foreign.register(
        graph, body=body, inputs={"rows": (rows, 0, None)}, outputs=out, live_rows=lambda: 3,
        state={"shared": (shared, 0, lambda: slots)},
    )  # fmt: skip
    graph.replay()
