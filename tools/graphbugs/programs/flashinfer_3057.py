"""flashinfer-ai/flashinfer#3057: numbers in pad rows set the scale that quantises live rows."""

from graphbugs.frame import capture, new_graph, numbered, tensor

import graphkit as gk

KIND = "leaking pad row"
rows, out = numbered(4), tensor(4, 4, value=0)


def body():
    scale = rows.abs().amax() / 127  # BUG
    return (rows / scale).round() * scale


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
