"""sgl-project/sglang#1094: sequence lengths of pad rows are not filled for the replay."""

from graphbugs.frame import capture, new_graph, numbered, tensor

import graphkit as gk

KIND = "leaking pad row"
seq_lens, hidden = tensor(4, 1, value=5), numbered(4)
out = tensor(4, 4, value=0)


def body():
    longest = seq_lens.amax()  # BUG
    return hidden * (longest - seq_lens)


def program():
    graph = new_graph()
    body()
    with capture(graph):
        out.copy_(body())
    gk.foreign.register(
        graph,
        body=body,
        inputs={"seq_lens": (seq_lens, 0, 1.0), "hidden": (hidden, 0, 0.0)},
        outputs=out,
        live_rows=lambda: 3,
    )
    seq_lens[3] = 1000
    graph.replay()
