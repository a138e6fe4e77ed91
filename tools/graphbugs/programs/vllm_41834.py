"""vllm-project/vllm#41834: another number of tokens per request replays the old split."""

from graphbugs.frame import capture, new_graph, numbered, tensor

KIND = "frozen value"
tokens, out = numbered(8), tensor(8, 4, value=0)


def forward(hidden, *, tokens_per_request):
    grouped = hidden.unflatten(0, (-1, tokens_per_request))  # BUG
    out.copy_(grouped.cumsum(1).flatten(0, 1))


class Engine:
    def __init__(self):
        self.options = {"tokens_per_request": 4}
        self.graph = new_graph()

    def warm_up(self):
        forward(tokens, **self.options)
        with capture(self.graph):
            forward(tokens, **self.options)


def program():
    engine = Engine()
    engine.warm_up()
    engine.graph.replay()
    engine.options = {"tokens_per_request": 2}
    engine.graph.replay()
