"""slwang-ustc/nano-vllm-v1#3: batches with chunks of prompts replay the graph of decode."""

from graphbugs.frame import capture, new_graph, numbered, tensor

import graphkit as gk

KIND = "wrong graph"
ids, out = numbered(4), tensor(4, 4, value=0)


class Sequence:
    def __init__(self, num_new_tokens):
        self.num_new_tokens = num_new_tokens


class ModelRunner:
    def __init__(self):
        self.sequences, self.graph = [Sequence(1)] * 4, new_graph()
        with capture(self.graph):
            out.copy_(ids * 3)
        gk.foreign.register(self.graph, name="decode 4", key=self.is_decode)

    def is_decode(self):
        return all(one.num_new_tokens == 1 for one in self.sequences)

    def run(self, sequences):
        self.sequences = sequences
        self.graph.replay()


def program():
    runner = ModelRunner()
    runner.run([Sequence(1)] * 3)
    runner.run([Sequence(1), Sequence(512)])
