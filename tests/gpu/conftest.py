"""A small verify step on CUDA, with its own backend per test."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch

import graphkit as gk

HIDDEN, VOCAB, WIDTH, LARGEST = 64, 32, 4, 16


class SkippedModule(pytest.Module):
    """A file of GPU tests on a machine without a GPU: imported, and skipped as one."""

    def collect(self):
        assert self.obj
        pytest.skip("needs a CUDA device, torch sees none")


def pytest_pycollect_makemodule(module_path, parent):
    """Create no items that would all be skipped: 1,700 take seconds, most of all with xdist."""
    if torch.cuda.is_available():
        return None
    return SkippedModule.from_parent(parent, path=module_path)


@pytest.fixture
def weight() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(HIDDEN, HIDDEN, device="cuda") / HIDDEN**0.5


@pytest.fixture
def forward(weight: torch.Tensor) -> Callable[[gk.TargetVerifyInputs], gk.ForwardOutput]:
    """A step whose hidden states identify the rows that were read."""

    def step(inputs: gk.TargetVerifyInputs) -> gk.ForwardOutput:
        hidden = inputs.input_embeds + inputs.positions[:, None] + inputs.input_ids[:, None]
        return gk.ForwardOutput(
            next_token_logits=(hidden @ weight)[:, :VOCAB], hidden_states=hidden
        )

    return step


@pytest.fixture
def make_runner(forward: Callable) -> Callable[..., gk.TargetVerifyRunner]:
    """Creates planned runners of the step, and closes them."""
    runners = []

    def make(step: Callable | None = None, **options) -> gk.TargetVerifyRunner:
        runner = gk.TargetVerifyRunner(
            step or forward,
            spec=gk.SpecConfig("EAGLE", num_steps=3, topk=1, num_draft_tokens=WIDTH),
            sizes=gk.BufferSizes(LARGEST, 128, HIDDEN, VOCAB, torch.float32),
            batch_sizes=options.pop("batch_sizes", [2, 4, 16]),
            optional_fields=["input_embeds"],
            backend=options.pop("backend", None) or gk.CudaBackend(),
            **options,
        )
        runners.append(runner)
        return runner

    yield make
    for runner in runners:
        runner.close()


@pytest.fixture
def make_batch() -> Callable[..., gk.TargetVerifyInputs]:
    """Creates a batch with ``mark`` in its rows: host fields in numpy, embeddings on the device."""

    def make(requests: int, mark: int, embeds: torch.Tensor | None = None) -> gk.TargetVerifyInputs:
        tokens = requests * WIDTH
        if embeds is None:
            embeds = torch.full((tokens, HIDDEN), float(mark), device="cuda")
        return gk.TargetVerifyInputs(
            req_pool_indices=np.arange(1, requests + 1),
            seq_lens=np.full(requests, 5, dtype=np.int32),
            input_ids=np.full(tokens, 1000 * mark),
            positions=np.arange(tokens),
            out_cache_loc=np.arange(1, tokens + 1),
            input_embeds=embeds,
        )

    return make


@pytest.fixture
def expected() -> Callable[[int, int], torch.Tensor]:
    """The hidden states of ``make_batch(requests, mark)``."""

    def make(requests: int, mark: int) -> torch.Tensor:
        rows = torch.arange(requests * WIDTH, device="cuda", dtype=torch.float32) + 1001.0 * mark
        return rows[:, None].expand(-1, HIDDEN)

    return make


@pytest.fixture(scope="session")
def kept_graph() -> Callable[..., torch.cuda.CUDAGraph]:
    """Captures a function with torch alone, and keeps the template."""

    def capture(function: Callable, attribution: gk.Attribution | None = None):
        """Capture a function without arguments."""
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side), torch.no_grad():
            for _ in range(2):
                function()
            side.synchronize()
            graph.capture_begin()
            if attribution is None:
                function()
            else:
                with attribution:
                    function()
            with warnings.catch_warnings(action="ignore"):
                graph.capture_end()
        torch.cuda.synchronize()
        return graph

    return capture
