"""beehive-lab/TornadoVM#1006: a consumer's buffer is replaced by a producer's after its capture."""

from graphbugs.frame import capture, new_graph, numbered, tensor

KIND = "replaced buffer"


class TaskGraph:
    def __init__(self):
        self.buffers = {"points": numbered(4), "result": tensor(4, 4, value=0)}
        self.graph = new_graph()

    def run(self):
        self.buffers["result"].copy_(self.buffers["points"] * 2)  # BUG

    def with_cuda_graph(self):
        with capture(self.graph):
            self.run()

    def consume_from(self, other):
        self.buffers["points"] = other.buffers["result"]


def program():
    producer, consumer = TaskGraph(), TaskGraph()
    producer.with_cuda_graph()
    consumer.with_cuda_graph()
    earlier = consumer.buffers["points"]
    consumer.graph.replay()
    consumer.consume_from(producer)
    producer.graph.replay()
    consumer.graph.replay()
    del earlier
