"""huggingface/transformers#45323: the longest key length is frozen, and missing in the key.

Continuous batching pads queries and keys to buckets, and looks graphs up by the padded lengths. The
attention also gets the exact longest length as a number, which the graph keeps: later batches of
the same bucket attend to fewer keys than they have.
"""

from graphbugs.frame import capture, new_graph, numbered, tensor

KIND = "frozen value"
keys = numbered(32)


class Batch:
    def __init__(self):
        self.query = tensor(1, 4)
        self.max_seqlen_k = 0


class Runner:
    def __init__(self):
        self.graphs, self.batch, self.out = {}, Batch(), tensor(1, 32, value=0)

    def attention(self, query, max_seqlen_k):
        scores = query @ keys[:max_seqlen_k].T  # BUG
        self.out[:, : scores.shape[1]] = scores

    def step(self, length):
        self.batch.max_seqlen_k = length
        bucket = -(-length // 16) * 16
        if bucket not in self.graphs:
            graph = new_graph()
            self.attention(self.batch.query, self.batch.max_seqlen_k)  # warms cuBLAS up
            with capture(graph):
                self.attention(self.batch.query, self.batch.max_seqlen_k)
            self.graphs[bucket] = graph
        self.graphs[bucket].replay()


def program():
    runner = Runner()
    for length in (9, 10, 11, 12):
        runner.step(length)
