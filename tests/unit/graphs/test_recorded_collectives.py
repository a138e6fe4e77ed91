"""Collectives in recorded graphs: a replay runs them again and waits for them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

from graphkit import RecorderBackend


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
