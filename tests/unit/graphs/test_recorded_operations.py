"""Operations that the recorder captures: as overloads, under dispatch modes, and of collectives."""

from __future__ import annotations

import threading
import time

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional

from graphkit import RecorderBackend
from graphkit.graphs.capture_state import compilation_disabled
from graphkit.graphs.operations import distinct_bytes, operands_in

X = torch.zeros(8, 4)


@pytest.mark.parametrize(
    ("tensor", "size"),
    [
        (X, 128),
        (X.t(), 128),
        (X[:, :2], 64),
        (X[2:4], 32),
        (X[0].expand(8, 4), 16),
        (X[:0], 0),
        (torch.tensor(1.0, dtype=torch.float64), 8),
    ],
)
def test_gaps_and_repeated_elements_do_not_count(tensor, size):
    assert distinct_bytes(tensor) == size


def test_tensors_are_found_at_any_depth_in_order():
    weight = nn.Parameter(torch.zeros(2))
    sparse = torch.eye(2).to_sparse()
    values = ((X, [weight, 3]), {"out": X[1]}, None, sparse)
    assert list(operands_in(values)) == [
        (X.data_ptr(), 128), (weight.data_ptr(), 8), (X.data_ptr() + 16, 16),
    ]  # fmt: skip


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


@pytest.fixture(scope="module", autouse=True)
def group():
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def gathered_into(x):
    out = torch.zeros_like(x)
    dist.all_gather_into_tensor(out, x * 2)
    return out


def gathered_in_a_list(x):
    out = [torch.zeros_like(x)]
    dist.all_gather(out, x * 2)
    return out[0] + 1


def gathered_functionally(x):
    return functional.all_gather_tensor(x * 2, 0, dist.group.WORLD) + 1


def reduced_functionally(x):
    return functional.all_reduce(x * 2, "sum", dist.group.WORLD)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("gradients", [True, False], ids=["grad", "no_grad"])
@pytest.mark.parametrize(
    "function",
    [gathered_into, gathered_in_a_list, gathered_functionally, reduced_functionally],
    ids=lambda function: function.__name__,
)
def test_a_replay_runs_the_collective_again(function, gradients):
    x = torch.arange(4.0)
    backend = RecorderBackend()
    with torch.set_grad_enabled(gradients):
        with backend.session():
            graph = backend.capture(lambda: function(x))
        for _ in range(2):
            x.add_(1)
            graph.replay()
            assert torch.equal(graph.output, function(x))
