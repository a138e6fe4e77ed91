"""vllm-project/vllm#49010: the attention backend plans with the longest length of the capture.

Short texts stay fluent, since they fit into the plan. Long contexts lose what is behind it.
"""

from graphbugs.frame import capture, new_graph, numbered, tensor

KIND = "frozen value"


class Plan:
    def __init__(self, max_length):
        self.max_length = max_length


class Attention:
    def __init__(self):
        self.current = Plan(8)
        self.scores, self.out = numbered(2, 64), tensor(2, value=0)

    def __call__(self):
        window = self.scores.narrow(1, 0, self.current.max_length)  # BUG
        self.out.copy_(window.amax(1))


def decode(attention, graph, length):
    attention.current = Plan(length)
    graph.replay()


def program():
    attention, graph = Attention(), new_graph()
    attention()
    with capture(graph):
        attention()
    for length in (8, 16, 32):
        decode(attention, graph, length)
