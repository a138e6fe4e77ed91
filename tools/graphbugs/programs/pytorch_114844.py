"""pytorch/pytorch#114844: an intermediate value that a model keeps is assigned anew."""

import torch
from graphbugs.frame import capture, device, new_graph, numbered, tensor

KIND = "replaced buffer"


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.x = tensor(2, 4)

    def forward(self, given):
        self.x.copy_(self.first(given))  # BUG
        return self.second(self.x)


def program():
    model, given, graph = Model().to(device), numbered(2), new_graph()
    model(given)
    with capture(graph):
        out = model(given)
    graph.replay()
    earlier, model.x = model.x, tensor(2, 4, value=100)
    graph.replay()
    del earlier, out
