"""vllm-project/vllm#48296: an update replaces draft weights, and the graph has the old ones."""

import torch
from graphbugs.frame import capture, device, new_graph, numbered

KIND = "replaced buffer"


class Drafter(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(4, 8, bias=False)

    def forward(self, hidden):
        return self.head(hidden)  # BUG


def update(module, weight):
    module.head.weight = torch.nn.Parameter(weight, requires_grad=False)


def program():
    drafter, hidden, graph = Drafter().to(device), numbered(2), new_graph()
    drafter(hidden)
    with capture(graph):
        logits = drafter(hidden)
    graph.replay()
    earlier = drafter.head.weight
    update(drafter, earlier.detach() + 1)
    graph.replay()
    del earlier, logits
