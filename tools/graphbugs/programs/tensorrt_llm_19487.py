"""NVIDIA/TensorRT-LLM#19487: unseeded requests draw identical samples.

The offset into the random stream belongs to the engine. It advances on the host, while the graph
keeps the offset of its capture.
"""

from graphbugs.frame import capture, new_graph, numbered, tensor

KIND = "frozen value"
lanes, samples = numbered(1, 8), tensor(1, 8, value=0)


class Stream:
    __slots__ = ("__weakref__", "offset")

    def __init__(self):
        self.offset = 1


def sample(stream):
    offset = stream.offset
    samples.copy_((lanes + offset * 0.37).sin())  # BUG


def program():
    stream, graph = Stream(), new_graph()
    sample(stream)
    with capture(graph):
        sample(stream)
    for _ in range(4):
        graph.replay()
        stream.offset += 8
