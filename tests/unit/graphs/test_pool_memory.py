"""Graphs give their pool memory, and attributed captures what was allocated in it."""

from __future__ import annotations

import torch

from graphkit.graphs import Attribution, GraphSequence, RecorderBackend

X = torch.ones(4)


def capture(function, attribution=None):
    return RecorderBackend().capture(function, attribution)


def test_the_memory_of_a_recorded_graph_is_that_of_its_results():
    graph = capture(lambda: (X + 1).view(2, 2).neg())
    blocks = graph.pool_memory()
    results = [tensor for op in graph.ops for tensor in op.results]
    assert [block.begin for block in blocks] == [tensor.data_ptr() for tensor in results]
    assert [block.end - block.begin for block in blocks] == [16, 16]
    assert all(block.is_live for block in blocks)
    blocks[-1].data.zero_()
    assert not graph.output.any(), "the bytes are the memory itself"
    graph.close()
    assert graph.pool_memory() == []


def test_a_sequence_has_the_memory_of_all_its_graphs_once():
    first, second = capture(lambda: X + 1), capture(lambda: X + 2)
    blocks = GraphSequence([first, second, first]).pool_memory()
    expected = [*first.pool_memory(), *second.pool_memory()]
    assert [block.begin for block in blocks] == [block.begin for block in expected]


def test_an_attributed_capture_lists_its_allocations():
    def step():
        memory = torch.empty(4, dtype=torch.float64)
        memory[1:].copy_(X[1:])  # a view and a write allocate nothing
        return memory.sort(), torch.split(X, 2)

    graph = capture(step, Attribution())
    (values, indices), _ = graph.output
    empty, *sorted_ = graph.allocations
    assert (empty.op, empty.dtype, empty.is_initialised) == (
        "aten::empty.memory_format", torch.float64, False,
    )  # fmt: skip
    assert empty.source.endswith("in step")
    assert empty.end - empty.begin == 32
    assert [(each.begin, each.dtype) for each in sorted_] == [
        (values.data_ptr(), torch.float64),
        (indices.data_ptr(), torch.int64),
    ]
    assert all(each.is_initialised and each.source.endswith("in step") for each in sorted_)
    assert capture(step).allocations == ()


def test_each_capture_has_its_own_allocations():
    attribution = Attribution()
    first = capture(lambda: X + 1, attribution)
    second = capture(lambda: X.sum() * 2, attribution)
    assert [len(graph.allocations) for graph in (first, second)] == [1, 2]
    assert len(GraphSequence([first, second]).allocations) == 3
