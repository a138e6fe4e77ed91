"""kekzl/imp#2013: the sampler's seed is baked into the loop's body: every draw is the same."""

from graphbugs.frame import capture, new_graph, numbered, tensor

KIND = "frozen value"


class Sampler:
    def __init__(self):
        self.seed, self.positions, self.out = 7, numbered(1, 8), tensor(1, 8, value=0)

    def body(self):
        mixed = self.positions * self.seed  # BUG
        self.out.copy_((mixed.sin() * 43758.5).frac().abs())


def program():
    sampler, graph = Sampler(), new_graph()
    sampler.body()
    with capture(graph):
        sampler.body()
    for seed in (7, 8, 9):
        sampler.seed = seed
        graph.replay()
