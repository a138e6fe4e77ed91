"""NVIDIA/TensorRT-LLM#17599: the seed of a slot is a number of the host, fixed at the capture."""

from graphbugs.frame import capture, new_graph, numbered, tensor

KIND = "frozen value"


class Slot:
    def __init__(self, seed):
        self.seed = seed


class Sampler:
    def __init__(self):
        self.slots, self.uniform = [Slot(3), Slot(5)], tensor(2, 4, value=0)
        self.counters = numbered(2)

    def draw(self):
        for index in range(2):
            slot = self.slots[index]
            self.uniform[index] = (self.counters[index] * slot.seed).frac()  # BUG


def program():
    sampler, graph = Sampler(), new_graph()
    sampler.draw()
    with capture(graph):
        sampler.draw()
    graph.replay()
    sampler.slots[1].seed = 11
    graph.replay()
