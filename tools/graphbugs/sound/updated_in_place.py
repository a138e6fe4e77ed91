"""New weights are copied into those that the graph reads."""

import torch
from graphbugs.frame import capture, device, new_graph, numbered


def program():
    layer, hidden, graph = torch.nn.Linear(4, 4).to(device), numbered(2), new_graph()
    layer(hidden)
    with capture(graph):
        result = layer(hidden)
    for _ in range(3):
        with torch.no_grad():
            layer.weight.copy_(layer.weight + 1)
        layer.load_state_dict(layer.state_dict())
        graph.replay()
    del result
