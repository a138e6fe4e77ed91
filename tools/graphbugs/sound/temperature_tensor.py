"""The temperature is a tensor that the host writes before each replay."""

from graphbugs.frame import capture, new_graph, numbered, tensor


class Sampler:
    def __init__(self):
        self.temperature, self.scale, self.steps = 1.0, tensor(1), 0
        self.logits, self.out = numbered(2), tensor(2, 4)

    def step(self):
        self.out.copy_(self.logits / self.scale)


def program():
    sampler, graph = Sampler(), new_graph()
    sampler.step()
    with capture(graph):
        sampler.step()
    for temperature in (1.0, 0.5, 0.25):
        sampler.temperature = temperature
        sampler.scale.fill_(temperature)
        sampler.steps += 1
        graph.replay()
