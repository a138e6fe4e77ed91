"""vllm-project/vllm#55013: after a deep sleep the fused draft graph reads freed addresses."""

import torch
from graphbugs.frame import capture, device, new_graph, numbered, tensor

KIND = "freed memory"
NEEDS = "cuda"


class Drafter:
    def __init__(self):
        self.embedding = torch.randn(1024, 1024, device=device)
        self.rows, self.out = numbered(4, 1024), tensor(4, 1024, value=0)

    def forward(self):
        self.out.copy_(self.rows @ self.embedding)  # BUG

    def sleep(self):
        self.embedding = self.embedding.cpu()
        torch.cuda.empty_cache()

    def wake_up(self):
        earlier = torch.randn(3, 1024, 1024, device=device)
        self.embedding = self.embedding.to(device)
        return earlier


def program():
    drafter, graph = Drafter(), new_graph()
    drafter.forward()
    with capture(graph):
        drafter.forward()
    graph.replay()
    drafter.sleep()
    earlier = drafter.wake_up()
    graph.replay()
    del earlier
