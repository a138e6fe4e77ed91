"""local-inference-lab/vllm#621: a phantom row with a stale binding corrupts recurrent state.

One row hits its graph exactly and is right; padded batches of two and more fail.
"""

import torch
from graphbugs.frame import capture, device, new_graph, numbered, tensor

import graphkit as gk

KIND = "leaking pad row"
rows, out, states = numbered(4), tensor(4, 4, value=0), tensor(8, 4, value=0)
bindings = torch.tensor([1, 2, 3, 4], device=device)


def body():
    states.index_add_(0, bindings, rows)  # BUG
    return states.index_select(0, bindings)


def program():
    graph = new_graph()
    body()
    with capture(graph):
        out.copy_(body())
    gk.foreign.register(
        graph, body=body, live_rows=lambda: 3, outputs=out,
        inputs={"rows": (rows, 0, None), "bindings": (bindings, 0, 0)},
    )  # fmt: skip
    graph.replay()  # 4 requests filled all rows
    bindings[:] = torch.tensor([1, 2, 3, 3], device=device)  # row 3 is a pad with a stale binding
    graph.replay()
