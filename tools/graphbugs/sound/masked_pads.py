"""Rows are weighted by a mask whose pads are zero, so that a sum over the batch is right."""

from graphbugs.frame import capture, new_graph, numbered, tensor

import graphkit as gk

rows, mask, out = numbered(4), tensor(4, 1), tensor(4, 4, value=0)


def body():
    return rows - (rows * mask).sum(0) / mask.sum()


def program():
    graph = new_graph()
    body()
    with capture(graph):
        out.copy_(body())
    inputs = {"rows": (rows, 0, None), "mask": (mask, 0, 0.0)}
    gk.foreign.register(graph, body=body, inputs=inputs, outputs=out, live_rows=lambda: 3)
    mask[3] = 0
    rows[3] = 0
    for _ in range(3):
        graph.replay()
