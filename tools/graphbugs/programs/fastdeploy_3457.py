"""PaddlePaddle/FastDeploy#3457: the number of running requests includes pad rows."""

from graphbugs.frame import capture, new_graph, numbered, tensor

import graphkit as gk

KIND = "leaking pad row"
is_running, hidden = tensor(4, 1), numbered(4)
out = tensor(4, 4, value=0)


def body():
    num_running = is_running.sum()  # BUG
    return hidden / num_running


def program():
    graph = new_graph()
    body()
    with capture(graph):
        out.copy_(body())
    gk.foreign.register(
        graph,
        body=body,
        inputs={"is_running": (is_running, 0, 0.0), "hidden": (hidden, 0, 0.0)},
        outputs=out,
        live_rows=lambda: 3,
    )
    graph.replay()
