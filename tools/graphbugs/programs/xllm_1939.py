"""xLLM-AI/xllm#1939: metadata of a padded batch describes the real sequences alone.

Offsets of pad rows keep what an earlier, larger batch left, and rows are divided by their number.
"""

from graphbugs.frame import capture, new_graph, numbered, tensor

import graphkit as gk

KIND = "leaking pad row"
lengths, values = tensor(4, 1, value=2), numbered(4)
out = tensor(4, 4, value=0)


def body():
    share = lengths / lengths.sum()  # BUG
    return values * share


def program():
    graph = new_graph()
    body()
    with capture(graph):
        out.copy_(body())
    gk.foreign.register(
        graph,
        body=body,
        inputs={"lengths": (lengths, 0, 0.0), "values": (values, 0, 0.0)},
        outputs=out,
        live_rows=lambda: 3,
    )
    graph.replay()
