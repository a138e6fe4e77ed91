"""A program captures again when the temperature changes, and drops the old graph."""

from graphbugs.frame import capture, new_graph, numbered, tensor


class Sampler:
    def __init__(self):
        self.temperature, self.graphs = 1.0, {}
        self.logits, self.out = numbered(2), tensor(2, 4, value=0)

    def set_temperature(self, temperature):
        self.temperature = temperature
        self.graphs.clear()

    def step(self):
        if 2 not in self.graphs:
            graph = new_graph()
            with capture(graph):
                self.out.copy_(self.logits / self.temperature)
            self.graphs[2] = graph
        self.graphs[2].replay()


def program():
    sampler = Sampler()
    for temperature in (1.0, 0.5):
        sampler.set_temperature(temperature)
        for _ in range(3):
            sampler.step()
