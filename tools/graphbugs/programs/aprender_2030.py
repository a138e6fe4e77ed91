"""paiml/aprender#2030: graphs are keyed by the batch size, and the sequence length is baked in."""

from graphbugs.frame import capture, new_graph, numbered, tensor

KIND = "frozen value"
keys, out = numbered(32), tensor(2, 4, value=0)


class Decoder:
    def __init__(self):
        self.graphs, self.seq_len = {}, 8

    def attend(self, batch_size):
        context = keys[: self.seq_len].mean(0)  # BUG
        out[:batch_size] = context

    def step(self, batch_size):
        if batch_size not in self.graphs:
            graph = new_graph()
            with capture(graph):
                self.attend(batch_size)
            self.graphs[batch_size] = graph
        self.graphs[batch_size].replay()
        self.seq_len += 1


def program():
    decoder = Decoder()
    for _ in range(6):
        decoder.step(2)
