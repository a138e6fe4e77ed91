"""vllm-project/vllm#48494: the number of drafts changes, and no graph has its length."""

from graphbugs.frame import capture, new_graph, numbered, tensor

KIND = "frozen value"


class Speculator:
    def __init__(self):
        self.num_drafts, self.drafts = 2, numbered(4, 8)
        self.accepted, self.graph = tensor(4, 8, value=0), None

    def verify(self):
        self.accepted.zero_()
        self.accepted[:, : self.num_drafts + 1] = self.drafts[:, : self.num_drafts + 1]  # BUG

    def step(self):
        if self.graph is None:
            self.graph = new_graph()
            with capture(self.graph):
                self.verify()
        self.graph.replay()


def program():
    speculator = Speculator()
    for num_drafts in (2, 3, 4):
        speculator.num_drafts = num_drafts
        speculator.step()
