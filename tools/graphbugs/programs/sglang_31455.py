"""sgl-project/sglang#31455: a verify graph is wrong, and is bisected by hand for two months.

The eager path derives its scale from the batch through a function; the graph keeps the result.
"""

from graphbugs.frame import capture, new_graph, numbered, tensor

import graphkit as gk

KIND = "graph bug"
hidden, out = numbered(4), tensor(4, 4, value=0)
lengths = [4, 4]


def softmax_scale():
    return 1.0 / sum(lengths)


def verify():
    return (hidden * softmax_scale()).softmax(1)  # BUG


def program():
    graph = new_graph()
    verify()
    with capture(graph):
        out.copy_(verify())
    gk.foreign.register(graph, body=verify, inputs={"hidden": (hidden, 0, None)}, outputs=out)
    graph.replay()
    lengths[:] = [64, 64]
    graph.replay()
