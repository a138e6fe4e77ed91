"""Ops in captured graphs on new values, and what an op launches."""

from __future__ import annotations

import pytest
import torch

from graphkit.ops.logits import argmax_rows, top_candidates
from graphkit.ops.rows import gather_rows, scatter_rows
from graphkit.ops.sampling import philox_uniform
from graphkit.ops.target_probs import target_probs
from launched_kernels import launches
from op_devices import on_cuda
from slot_cases import CASES as SLOT_CASES, Draw
from step_cases import CASES as STEP_CASES, assert_equal, results

pytestmark = pytest.mark.gpu
CASES = {
    **{name: (op, make, 2) for name, (op, make, _) in STEP_CASES.items()},
    **{
        name: (op, lambda requests, seed, make=make: make(Draw(requests, seed=seed)), 0)
        for name, (op, make) in SLOT_CASES.items()
    },
}
"""Ops, their arguments of so many requests and a seed, and the seed of the case to count for."""


def facts(args):
    """What a graph has captured: shapes, dtypes and numbers."""
    return [(a.shape, a.dtype) if isinstance(a, torch.Tensor) else a for a in args]


def copies(args):
    return [each.clone() if isinstance(each, torch.Tensor) else each for each in args]


def written(op, returned, args):
    """Return results, and all arguments of an op of slots."""
    if op.__name__ in SLOT_CASES:
        returned = returned if isinstance(returned, tuple) else (returned,)
        return [each for each in (*returned, *args) if isinstance(each, torch.Tensor)]
    return results(op, returned, args)


def captured(call):
    """Capture a call that has run before; return its graph and what it returned."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        returned = call()
    return graph, returned


def kernels_of(call):
    """Return the kernels of a call, which must not copy, fill or run others than ours."""
    names = launches(call)
    assert not [name for name in names if name.startswith(("Mem", "void"))]
    return [name for name in names if name.endswith("_kernel")]


@pytest.mark.parametrize("name", CASES)
def test_a_graph_replays_on_new_values(name):
    op, make, _ = CASES[name]
    first = make(8, 3)
    others = (make(8, seed) for seed in range(4, 2000))
    later = next((args for args in others if facts(args) == facts(first)), first)
    ours = on_cuda(list(first))
    op(*on_cuda(list(first)))
    graph, returned = captured(lambda: op(*ours))
    for args in (later, first):
        for each, new in zip(ours, args, strict=True):
            if isinstance(each, torch.Tensor):
                each.copy_(new)
        graph.replay()
        again = copies(args)
        got, want = written(op, returned, ours), written(op, op(*again), again)
        assert_equal([each.cpu() for each in got], want)


@pytest.mark.parametrize("name", STEP_CASES)
def test_ops_of_a_step_launch_few_kernels(name):
    """One, but for ``target_probs``, whose rows several programs share at any size."""
    op, make, seed = CASES[name]
    args = on_cuda(list(make(8, seed)))
    kernels = {
        target_probs: ["scan_logits_kernel", "select_weights_kernel", "write_probs_kernel"]
    }.get(op, [f"{op.__name__}_kernel"])
    assert kernels_of(lambda: op(*args)) == kernels


@pytest.mark.parametrize("name", SLOT_CASES)
def test_ops_of_slots_launch_one_kernel(name):
    op, make, seed = CASES[name]
    args = on_cuda(list(make(8, seed)))
    names = launches(lambda: op(*args))
    assert len([each for each in names if each.endswith("_kernel")]) == 1
    assert not [each for each in names if each.startswith("Memcpy")]


@pytest.mark.parametrize("rows", [1, 6, 40])
def test_rows_in_parts_take_two_launches(rows):
    logits = torch.randn(rows, 128_256, device="cuda").bfloat16()
    tokens = torch.empty(rows, dtype=torch.int64, device="cuda")
    kernels = ["argmax_rows_kernel", "join_argmax_kernel"]
    names = launches(lambda: argmax_rows(tokens, logits))
    assert [name for name in names if name.endswith("_kernel")] == kernels
    kernels = ["top_candidates_kernel", "join_candidates_kernel"]
    names = launches(lambda: top_candidates(logits, 4))
    assert [name for name in names if name.endswith("_kernel")] == kernels


@pytest.mark.parametrize("vocab", [24_577, 32_000, 128_256])
@pytest.mark.parametrize("rows", [1, 6, 40, 132, 300])
def test_a_graph_joins_the_parts_of_rows(rows, vocab):
    """Equal values, NaN and -inf in several parts. Nothing is left of the replay before."""
    logits = torch.zeros(rows, vocab, dtype=torch.bfloat16, device="cuda")
    tokens = torch.empty(rows, dtype=torch.int64, device="cuda")
    argmax_rows(tokens, logits)
    graph, _ = captured(lambda: argmax_rows(tokens, logits))
    torch.manual_seed(vocab)
    for fill in (0, -torch.inf, 1):
        values = torch.randint(0, 9, (rows, vocab)).bfloat16()
        values[::3] = fill
        values[1::3, [vocab - 1, vocab // 2, 5000]] = 9
        values[2::6, vocab // 3 :: 999] = torch.nan
        values[5::6] = -torch.inf
        values[5::6, vocab - 1] = -3
        logits.copy_(values)
        for _ in range(3):
            tokens.fill_(-1)
            graph.replay()
            assert torch.equal(tokens.cpu(), values.argmax(-1))


def random_requests(requests):
    generator = torch.Generator().manual_seed(0)
    seeds = torch.randint(-(2**63), 2**63 - 1, (requests,), generator=generator)
    return seeds, torch.randint(-(2**31), 2**31, (requests,), generator=generator).int()


def test_a_graph_draws_at_the_current_positions():
    args = random_requests(8)
    seeds, positions = on_cuda(args)
    philox_uniform(seeds, positions, 5)
    graph, samples = captured(lambda: philox_uniform(seeds, positions, 5))
    for step in range(1, 4):
        positions += 1
        graph.replay()
        assert torch.equal(samples.cpu(), philox_uniform(args[0], args[1] + step, 5))


def test_samples_take_one_launch():
    args = on_cuda(random_requests(300))
    assert kernels_of(lambda: philox_uniform(*args, 33)) == ["philox_uniform_kernel"]


def rows_of_two_tensors():
    targets = torch.zeros(9, 1).long().cuda(), torch.zeros(9, 2304).bfloat16().cuda()
    return list(targets), torch.tensor([8, 0, 3], device="cuda")


def test_one_launch_scatters_into_several_tensors():
    targets, index = rows_of_two_tensors()
    sources = [torch.ones_like(target[:3]) for target in targets]
    assert kernels_of(lambda: scatter_rows(targets, sources, index)) == ["scatter_rows_kernel"]


def test_a_graph_replays_on_new_rows():
    targets, index = rows_of_two_tensors()
    graph, _ = captured(
        lambda: scatter_rows(targets, [gather_rows(each, index) + 1 for each in targets], index)
    )
    for rows in ([1, 2, 4], [8, 1, 4]):
        index.copy_(torch.tensor(rows))
        graph.replay()
    assert [target[:, 0].tolist() for target in targets] == [[0, 2, 1, 0, 2, 0, 0, 0, 1]] * 2
