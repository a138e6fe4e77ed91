"""NVIDIA/TensorRT-LLM#19306: metadata is rebound, and the replay reads the old tensor."""

from graphbugs.frame import capture, new_graph, numbered, tensor

KIND = "replaced buffer"


class Metadata:
    def __init__(self):
        self.block_offsets = tensor(4, 4, value=1)


class Engine:
    def __init__(self):
        self.metadata, self.out = Metadata(), tensor(4, 4, value=0)
        self.keys, self.graph = numbered(4), new_graph()

    def forward(self):
        self.out.copy_(self.keys * self.metadata.block_offsets)  # BUG

    def prepare(self, value):
        self.metadata.block_offsets = tensor(4, 4, value=value)


def program():
    engine = Engine()
    with capture(engine.graph):
        engine.forward()
    engine.graph.replay()
    earlier = engine.metadata.block_offsets
    engine.prepare(2)
    engine.graph.replay()
    del earlier
