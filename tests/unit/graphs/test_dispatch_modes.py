"""Eager runs of compiled functions, in one thread and in two."""

from __future__ import annotations

import threading
import time

import pytest
import torch
import torch._dynamo

from graphkit.graphs.capture_state import compilation_disabled


@pytest.fixture
def is_compiled():
    """Returns whether torch.compile compiles a function that is called now."""
    torch._dynamo.reset()
    compiled_graphs = []

    def backend(graph, _inputs):
        compiled_graphs.append(graph)
        return graph

    def check():
        compiled_graphs.clear()
        torch.compile(lambda x: x + len(compiled_graphs), backend=backend)(torch.ones(2))
        return bool(compiled_graphs)

    return check


def test_nothing_is_compiled_until_the_outer_block_ends(is_compiled):
    assert is_compiled()
    with compilation_disabled(), compilation_disabled():
        assert not is_compiled()
    assert is_compiled()


def test_compilation_is_enabled_again_after_an_error(is_compiled):
    with pytest.raises(KeyError), compilation_disabled():
        raise KeyError
    assert is_compiled()


def test_blocks_of_two_threads_do_not_overlap(is_compiled):
    begun, running, counts = threading.Barrier(2), [], []

    def block():
        begun.wait(10)
        with compilation_disabled():
            running.append(0)
            time.sleep(0.02)
            counts.append(len(running))
            running.pop()

    threads = [threading.Thread(target=block) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts == [1, 1]
    assert is_compiled()
