"""vllm-project/vllm#54997: an operator of the drafter takes another path while it is captured.

No draft is accepted with graphs, and 92 % without them.
"""

from graphbugs.frame import capture, is_capturing, new_graph, numbered, tensor

import graphkit as gk

KIND = "graph bug"
rows, out = numbered(4), tensor(4, 4, value=0)


def quantised(x):
    if is_capturing():
        return x.floor()
    return x.round()  # BUG


def body():
    return quantised(rows * 3)


def program():
    graph = new_graph()
    body()
    with capture(graph):
        out.copy_(body())
    gk.foreign.register(
        graph, name="draft", body=body, inputs={"rows": (rows, 0, None)}, outputs=out
    )
    graph.replay()
