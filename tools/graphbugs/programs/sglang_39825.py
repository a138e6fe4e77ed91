"""sgl-project/sglang#39825: the number of key splits that the host plans is frozen.

The plan follows the longest sequence. Captures succeed and outputs look right; drafts are accepted
less often, because splits beyond those of the capture are never read.
"""

from graphbugs.frame import capture, new_graph, numbered, tensor

KIND = "frozen value"


class Backend:
    def __init__(self):
        self.keys, self.out, self.num_splits = numbered(64), tensor(4, value=0), 1

    def plan(self, longest):
        self.num_splits = max(1, longest // 16)

    def forward(self):
        used = self.num_splits * 16
        self.out.copy_(self.keys[:used].sum(0))  # BUG


def program():
    backend, graph = Backend(), new_graph()
    backend.plan(16)
    with capture(graph):
        backend.forward()
    for longest in (16, 32, 48):
        backend.plan(longest)
        graph.replay()
