"""philox_uniform on CUDA equals its torch reference bit for bit, eager and in captured graphs."""

from __future__ import annotations

import pytest
import torch

from graphkit.ops import philox_uniform

pytestmark = pytest.mark.gpu


def random_requests(requests, seed=0):
    generator = torch.Generator().manual_seed(seed)
    seeds = torch.randint(-(2**63), 2**63 - 1, (requests,), generator=generator)
    positions = torch.randint(-(2**31), 2**31, (requests,), generator=generator)
    return seeds, positions.int()


def on_device(args):
    return [each.cuda() for each in args]


@pytest.mark.parametrize("draws", [1, 4, 5, 33, 4096])
@pytest.mark.parametrize("requests", [0, 1, 31, 1025])
def test_random_requests(requests, draws):
    args = random_requests(requests, seed=draws)
    samples = philox_uniform(*on_device(args), draws)
    assert samples.dtype == torch.float32
    assert torch.equal(samples.cpu(), philox_uniform(*args, draws))


def test_limits_of_seeds_and_positions():
    seeds = torch.tensor([0, -1, 2**32, 2**63 - 1, -(2**63)]).repeat_interleave(4)
    positions = torch.tensor([0, -1, 2**31 - 1, -(2**31)], dtype=torch.int32).repeat(5)
    samples = philox_uniform(seeds.cuda(), positions.cuda(), 33)
    assert torch.equal(samples.cpu(), philox_uniform(seeds, positions, 33))


def test_strided_and_unaligned_rows():
    args = random_requests(65)
    for rows in (slice(1, None), slice(1, None, 2)):
        samples = philox_uniform(*(each[rows] for each in on_device(args)), 5)
        assert torch.equal(samples.cpu(), philox_uniform(*(each[rows] for each in args), 5))


def test_a_graph_draws_at_the_current_positions():
    args = random_requests(8)
    seeds, positions = on_device(args)
    philox_uniform(seeds, positions, 5)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        samples = philox_uniform(seeds, positions, 5)
    for step in range(1, 4):
        positions += 1
        graph.replay()
        assert torch.equal(samples.cpu(), philox_uniform(args[0], args[1] + step, 5))


def test_one_launch():
    args = *on_device(random_requests(300)), 33
    philox_uniform(*args)
    torch.cuda.synchronize()
    cuda = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=cuda, acc_events=True) as profile:
        philox_uniform(*args)
        torch.cuda.synchronize()
    launched = [event.name for event in profile.events() if event.device_type.name == "CUDA"]
    assert [each for each in launched if each.endswith("_kernel")] == ["philox_uniform_kernel"]
    assert not [each for each in launched if each.startswith(("Mem", "void"))]
