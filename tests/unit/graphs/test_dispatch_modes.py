"""Running compiled functions as they are written, in one thread and in several."""

from __future__ import annotations

import threading
import time

import pytest
import torch
import torch._dynamo

from graphkit.graphs.dispatch_modes import compilation_disabled


@pytest.fixture
def is_compiled():
    """Whether a function of torch.compile is compiled when it is called now."""
    torch._dynamo.reset()
    pieces = []

    def backend(graph, _inputs):
        pieces.append(graph)
        return graph

    def ask():
        pieces.clear()
        torch.compile(lambda x: x + len(pieces), backend=backend)(torch.ones(2))
        return bool(pieces)

    return ask


def test_nothing_is_compiled_inside_and_all_is_afterwards(is_compiled):
    assert is_compiled()
    with compilation_disabled(), compilation_disabled():
        assert not is_compiled()
    assert is_compiled()


def test_an_error_inside_puts_it_back(is_compiled):
    with pytest.raises(KeyError), compilation_disabled():
        raise KeyError
    assert is_compiled()


def test_blocks_of_two_threads_wait_for_one_another(is_compiled):
    begun, running, most = threading.Barrier(2), [], []

    def block():
        begun.wait(10)
        with compilation_disabled():
            running.append(0)
            time.sleep(0.02)
            most.append(len(running))
            running.pop()

    threads = [threading.Thread(target=block) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1, 1]
    assert is_compiled()
