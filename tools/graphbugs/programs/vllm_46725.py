"""vllm-project/vllm#46725: draft weights are zero after a sleep in reinforcement learning."""

import torch
from graphbugs.frame import capture, device, new_graph, numbered

import graphkit as gk

KIND = "weight differs"


class Drafter(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(4, 8, bias=False)

    def forward(self, hidden):
        return self.head(hidden)  # BUG

    def sleep(self):
        self.head.weight.data.zero_()


def program():
    drafter, hidden, graph = Drafter().to(device), numbered(2), new_graph()
    drafter(hidden)
    with capture(graph):
        logits = drafter(hidden)
    graph.replay()
    before = gk.graph_digest()
    drafter.sleep()
    gk.compare_digest(before)
    graph.replay()
    del logits
