"""The table of operations that the recorder follows, proved by captures on CUDA."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import graphkit as gk
from capture_cases import CASES, CUDA_ONLY, REPLAYS, make_inputs
from graphkit.graphs import CaptureFailure

pytestmark = pytest.mark.gpu


def failure_on_cuda(case):
    """The failure that a runner reports for a case, or ``None``."""
    backend, inputs = gk.CudaBackend(), make_inputs("cuda")

    def function():
        return case.function(inputs)

    with backend.session():
        try:
            backend.warm_up(function)
            graph = backend.capture(function)
        except CaptureFailure as failure:
            return backend.diagnose(function) or failure
        graph.replay()
        graph.close()
    return None


@pytest.mark.parametrize("case", [*CASES, *CUDA_ONLY], ids=lambda case: case.name)
def test_cuda_agrees_with_the_table(case):
    failure = failure_on_cuda(case)
    assert (failure and failure.cause) is case.cause, failure


@pytest.mark.parametrize("case", REPLAYS, ids=lambda case: case.name)
def test_replays_agree_with_the_table(case):
    backend = gk.CudaBackend()
    if case.loops and backend.no_loop_reason:
        pytest.skip(backend.no_loop_reason)
    assert case.function(backend) == case.expected


def test_pools_with_large_ids_are_captured_into():
    """torch 2.11 drops a reference to the id that it lists segments of."""
    while torch.cuda.graph_pool_handle()[1] <= 1000:
        pass
    backend, x = gk.CudaBackend(), torch.ones(4, device="cuda")
    with backend.session():
        graphs = [backend.capture(lambda: x + 1) for _ in range(20)]
        assert isinstance(backend.pool.id[1], int)
    for graph in graphs:
        graph.close()


class Reads(nn.Module):
    def forward(self, x):
        return x.sum().item()


def test_a_failure_and_its_diagnosis_name_the_module():
    backend, model, inputs = gk.CudaBackend(), nn.Sequential(Reads()), make_inputs("cuda")
    with backend.session():
        with pytest.raises(CaptureFailure, match=r"in module Sequential\.0"):
            backend.capture(lambda: model(inputs.x))
        diagnosis = backend.diagnose(lambda: model(inputs.x))
    assert diagnosis.where.endswith("` in module Sequential.0")


def test_a_diagnosis_takes_the_path_of_the_capture():
    """A read that the model skips during captures is not reported."""
    backend, inputs = gk.CudaBackend(), make_inputs("cuda")

    def function():
        if not torch.cuda.is_current_stream_capturing():
            inputs.x.sum().item()
        return inputs.x.nonzero()

    with backend.session():
        with pytest.raises(CaptureFailure):
            backend.capture(function)
        diagnosis = backend.diagnose(function)
    assert diagnosis.where.startswith("aten::nonzero at ")
    assert not torch.cuda.is_current_stream_capturing()
