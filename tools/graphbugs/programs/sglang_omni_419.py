"""sgl-project/sglang-omni#419: the sampling seed that a server has at its start stays in the graph.

Requests bring seeds of their own. The field of the sampling settings that the capture read is a
number, so that outputs depend on the boot of the server.
"""

from graphbugs.frame import capture, new_graph, numbered, tensor

KIND = "frozen value"


class Server:
    def __init__(self):
        self.settings = {"seed": 1234, "top_k": 8}
        self.logits, self.choice = numbered(2, 8), tensor(2, 8, value=0)
        self.graph = new_graph()

    def sample(self):
        settings = self.settings
        shift = settings["seed"] % 97
        self.choice.copy_(self.logits.add(shift))  # BUG

    def start(self):
        with capture(self.graph):
            self.sample()

    def handle(self, seed):
        self.settings["seed"] = seed
        self.graph.replay()


def program():
    server = Server()
    server.start()
    for seed in (1234, 5, 6):
        server.handle(seed)
