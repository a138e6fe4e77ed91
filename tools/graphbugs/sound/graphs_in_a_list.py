"""Graphs of several sizes are in a list; the loop over the sizes has ended when they replay."""

from graphbugs.frame import capture, new_graph, numbered, tensor

rows, out = numbered(8), tensor(8, 4, value=0)


def program():
    sizes, graphs = (1, 2, 4, 8), []
    for size in sizes:
        graph = new_graph()
        with capture(graph):
            out[:size] = rows[:size] * 2
        graphs.append(graph)
    for live in (1, 3, 8):
        index = next(at for at, size in enumerate(sizes) if size >= live)
        graphs[index].replay()
