"""sgl-project/sglang#25512: compressed attention reads the pad row when 3 requests pad to 4."""

from graphbugs.frame import capture, new_graph, numbered, tensor

import graphkit as gk

KIND = "leaking pad row"
rows, out = numbered(4), tensor(4, 4, value=0)


def body():
    pairs = rows.view(2, 2, 4)
    compressed = pairs.amax(1, keepdim=True)  # BUG
    return (pairs + compressed).view(4, 4)


def program():
    graph = new_graph()
    body()
    with capture(graph):
        out.copy_(body())
    gk.foreign.register(
        graph,
        body=body,
        inputs={"rows": (rows, 0, None)},
        outputs=out,
        live_rows=lambda: 3,
    )
    graph.replay()
