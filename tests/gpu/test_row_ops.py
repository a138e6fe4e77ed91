"""Ops that copy rows on CUDA against torch, eager and in a captured graph."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch

from graphkit.models.heads.layers import Embedding
from graphkit.ops.rows import gather_rows, scatter_rows

pytestmark = pytest.mark.gpu
CASES = runpy.run_path(str(Path(__file__).parents[1] / "unit" / "ops" / "row_cases.py"))
CUDA = torch.device("cuda")


def test_gathered_rows_are_those_of_the_index():
    for source, index in CASES["gathers"](CUDA):
        assert torch.equal(gather_rows(source, index), source[index.long()])


def test_scattered_rows_are_at_the_index():
    for targets, sources, index in CASES["scatters"](CUDA):
        expected = [target.clone() for target in targets]
        for target, source in zip(expected, sources, strict=True):
            target[index.long()] = source
        scatter_rows(targets, sources, index)
        assert all(map(torch.equal, targets, expected))


def test_rows_outside_are_the_nearest_or_dropped():
    source = torch.arange(8.0, device=CUDA).view(4, 2)
    outside = torch.tensor([-1, 1, 4, 2**40], device=CUDA)
    assert torch.equal(gather_rows(source, outside), source[[0, 1, 3, 3]])
    target = torch.zeros(4, 2, device=CUDA)
    scatter_rows([target], [source], outside)
    assert target.tolist() == [[0, 0], [2, 3], [0, 0], [0, 0]]


@pytest.mark.parametrize("is_tied", [False, True], ids=["by rows", "by columns"])
@torch.no_grad()
def test_an_embedding_reads_its_weight_in_place(is_tied):
    embedding = Embedding(50, 96, device=CUDA)
    if is_tied:  # as store_by_columns leaves a float32 weight that is also the output head
        embedding.weight.data = embedding.weight.data.t().contiguous().t()
    ids = torch.randint(50, (2, 7), device=CUDA)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    got = embedding(ids)
    most = torch.cuda.max_memory_allocated() - before
    assert torch.equal(got, embedding.weight[ids])
    assert most < embedding.weight.nbytes


def test_one_launch_scatters_into_several_tensors():
    targets = [torch.zeros(9, 1, device=CUDA).long(), torch.zeros(9, 2304, device=CUDA).bfloat16()]
    sources = [torch.ones_like(target[:3]) for target in targets]
    index = torch.tensor([8, 0, 3], device=CUDA)
    scatter_rows(targets, sources, index)
    torch.cuda.synchronize()
    cuda = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=cuda, acc_events=True) as profile:
        scatter_rows(targets, sources, index)
        torch.cuda.synchronize()
    launched = [event.name for event in profile.events() if event.device_type.name == "CUDA"]
    assert [each for each in launched if each.endswith("_kernel")] == ["scatter_rows_kernel"]
    assert not [each for each in launched if each.startswith(("Mem", "void"))]


def test_a_graph_replays_on_new_rows():
    targets = [torch.zeros(9, 1, device=CUDA).long(), torch.zeros(9, 2304, device=CUDA).bfloat16()]
    index = torch.tensor([8, 0, 3], device=CUDA)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        scatter_rows(targets, [gather_rows(target, index) + 1 for target in targets], index)
    for rows in ([1, 2, 4], [8, 1, 4]):
        index.copy_(torch.tensor(rows))
        graph.replay()
    assert [target[:, 0].tolist() for target in targets] == [[0, 2, 1, 0, 2, 0, 0, 0, 1]] * 2
