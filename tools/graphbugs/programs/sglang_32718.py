"""sgl-project/sglang#32718: memory that a graph reads is dropped by the sleep of a memory saver."""

import torch
from graphbugs.frame import capture, device, new_graph, numbered, tensor

KIND = "freed memory"
NEEDS = "cuda"


class Saver:
    def __init__(self):
        self.pool = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(self.pool):
            self.scale = torch.full((1, 1024), 2.0, device=device)

    def sleep(self):
        self.scale = self.pool = None
        torch.cuda.empty_cache()


def program():
    saver, rows, out, graph = Saver(), numbered(4, 1024), tensor(4, 1024, value=0), new_graph()
    torch.mul(rows, saver.scale, out=out)
    with capture(graph):
        torch.mul(rows, saver.scale, out=out)  # BUG
    graph.replay()
    saver.sleep()
    graph.replay()
