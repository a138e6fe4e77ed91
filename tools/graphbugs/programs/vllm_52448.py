"""vllm-project/vllm#52448: metadata has today's stride, and the kernel the capture's.

The first row is right at every stride, so that only later rows become token salad.
"""

from graphbugs.frame import capture, new_graph, numbered, tensor

KIND = "frozen value"


class Metadata:
    def __init__(self):
        self.packed, self.stride, self.rows = tensor(64, value=0), 4, tensor(4, 4, value=0)

    def build(self, stride):
        self.stride = stride
        self.packed.zero_()
        self.packed[: 4 * stride].view(4, stride)[:, :4] = numbered(4)


def attention(metadata):
    table = metadata.packed.as_strided((4, 4), (metadata.stride, 1))  # BUG
    metadata.rows.copy_(table)


def program():
    metadata, graph = Metadata(), new_graph()
    metadata.build(4)
    with capture(graph):
        attention(metadata)
    for stride in (4, 8):
        metadata.build(stride)
        graph.replay()
