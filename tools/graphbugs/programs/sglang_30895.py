"""sgl-project/sglang#30895: pad rows enter a sum over the batch."""

from graphbugs.frame import capture, new_graph, numbered, tensor

import graphkit as gk

KIND = "leaking pad row"


def program():
    rows, out = tensor(4, 4), tensor(4, 4, value=0)

    def body():
        total = rows.sum(0, keepdim=True)  # BUG
        return rows / total

    graph = new_graph()
    body()
    with capture(graph):
        out.copy_(body())
    gk.foreign.register(
        graph, body=body, inputs={"rows": (rows, 0, None)}, outputs=out, live_rows=lambda: 3
    )
    rows[:3] = numbered(3) + 1
    rows[3] = 0
    graph.replay()
