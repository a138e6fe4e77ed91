"""vllm-project/vllm#53051: a prompt of K + 1 tokens replays a verify graph.

The recurrent state of the prompt is then never written, and its request stays wrong.
"""

from graphbugs.frame import capture, new_graph, numbered, tensor

import graphkit as gk

KIND = "wrong graph"
hidden, out, state = numbered(3), tensor(3, 4, value=0), tensor(1, 4, value=0)
batch = {"mode": "verify", "num_tokens": 3}


def verify():
    return hidden.cumsum(0) + state


def program():
    graphs = {3: new_graph()}
    verify()
    with capture(graphs[3]):
        out.copy_(verify())
    gk.foreign.register(
        graphs[3], name="verify 3", key=lambda: (batch["mode"], batch["num_tokens"])
    )
    for mode in ("verify", "prefill"):
        batch["mode"] = mode
        graphs[batch["num_tokens"]].replay()
