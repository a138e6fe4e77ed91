"""A decode step stores keys in slots of a cache, of which the program declares the rows."""

import torch
from graphbugs.frame import capture, device, new_graph, numbered, tensor

import graphkit as gk

rows, out, cache = numbered(4), tensor(4, 4, value=0), tensor(64, 4, value=0)
slots = torch.tensor([1, 2, 3, 0], device=device)


def body():
    cache[slots] = rows
    return cache[slots] * 2 + 1


def program():
    graph = new_graph()
    body()
    with capture(graph):
        out.copy_(body())
    inputs = {"rows": (rows, 0, None), "slots": (slots, 0, 0)}
    gk.foreign.register(
        graph, name="decode 4", body=body, inputs=inputs, outputs=out, live_rows=lambda: 3,
        key=lambda: "decode", state={"cache": (cache, 0, lambda: slots)},
    )  # fmt: skip
    for step in range(4):
        slots[:3] += 3 * (step > 0)
        rows.fill_(step + 1.0)
        graph.replay()
