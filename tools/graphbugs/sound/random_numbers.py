"""Dropout in a graph: each replay draws other numbers."""

import torch
from graphbugs.frame import capture, new_graph, numbered, tensor

rows, out = numbered(8), tensor(8, 4, value=0)


def forward():
    out.copy_(torch.nn.functional.dropout(rows, 0.25, training=True))


def program():
    graph = new_graph()
    forward()
    with capture(graph):
        forward()
    seen = []
    for _ in range(4):
        graph.replay()
        seen.append(out.clone())
