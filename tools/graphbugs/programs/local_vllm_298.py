"""local-inference-lab/vllm#298: a batch of prompts has the shape of a verify, whose graph runs."""

from graphbugs.frame import capture, new_graph, numbered, tensor

import graphkit as gk

KIND = "wrong graph"
WIDTH = 6


class Scheduled:
    def __init__(self, decoding, lengths):
        self.decoding, self.lengths = decoding, lengths

    def shape(self):
        return len(self.lengths), max(self.lengths)


class Dispatcher:
    def __init__(self):
        self.batch, self.graphs = Scheduled([True], [WIDTH]), {}
        self.hidden, self.out = numbered(WIDTH), tensor(WIDTH, 4, value=0)
        graph = self.graphs[self.batch.shape()] = new_graph()
        with capture(graph):
            self.out.copy_(self.hidden.tanh())
        gk.foreign.register(graph, name="full decode", key=lambda: all(self.batch.decoding))

    def dispatch(self, batch):
        self.batch = batch
        self.graphs[batch.shape()].replay()


def program():
    dispatcher = Dispatcher()
    dispatcher.dispatch(Scheduled([True], [WIDTH]))
    dispatcher.dispatch(Scheduled([False], [WIDTH]))
