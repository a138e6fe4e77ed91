"""vllm-project/vllm#45425: drafts with context parallelism replay graphs without it."""

from graphbugs.frame import capture, new_graph, numbered, tensor

import graphkit as gk

KIND = "wrong graph"
keys, out = numbered(8), tensor(4, value=0)


class Config:
    def __init__(self):
        self.context_ranks, self.uses_drafts = 1, True


def attend():
    return keys.mean(0)


def program():
    config, graph = Config(), new_graph()
    with capture(graph):
        out.copy_(attend())
    gk.foreign.register(
        graph,
        name="decode",
        key=lambda: (config.context_ranks, config.uses_drafts),
    )
    graph.replay()
    config.context_ranks = 2
    graph.replay()
