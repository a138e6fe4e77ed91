"""All modes on both backends, chain and tree, over small models with random weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from declared_modes import MODES
from graphkit.audit.runs.equal_state_runs import compare_runs
from graphkit.buffers import Axis
from graphkit.runners import Runner
from graphkit.runners.targets import CaptureTarget
from graphkit.spec import ForwardMode
from small_targets import drafted_llama, llama_target

Tensors = Mapping[str, torch.Tensor]
LARGEST = 16
LOOSE = {torch.bfloat16: 3e-2, torch.float32: 1e-4}
"""Relative and absolute difference allowed between padded and unpadded numbers."""


@dataclass(frozen=True)
class Captured:
    """A captured runner of one mode, with batches for it."""

    target: CaptureTarget
    runner: Runner[Any, Any]

    def batch(self, live: int, seed: int) -> Any:
        """Return a live batch."""
        return self.target.batch(self.runner.mode, live, seed)

    def rows(self, axis: Axis, batch: Any) -> int:
        """Return the number of live rows of an axis."""
        return self.runner.buffers.capacity.rows(axis, batch.batch_size, batch.num_tokens)

    def poison(self) -> None:
        """Fill every input buffer with NaN, or with the largest integer."""
        for tensor in self.runner.buffers.arena.tensors.values():
            if tensor.is_floating_point():
                tensor.fill_(torch.nan)
            elif tensor.dtype is torch.bool:
                tensor.fill_(False)
            else:
                tensor.fill_(torch.iinfo(tensor.dtype).max)

    def replay(self, batch: Any, size: int | None = None) -> Tensors:
        """Return a copy of the output of a replay."""
        return self.runner.replay(batch, padded_batch_size=size, clone=True).tensors()

    def assert_right(self, batch: Any, size: int | None = None) -> None:
        """Assert that a replay equals its padded run in every bit, and the unpadded run closely.

        The replay runs first, on the buffers as they are.
        """
        size = size or self.runner.table.fit(batch.batch_size)
        comparison = compare_runs(self.runner, batch, size, _allowed)
        assert comparison.mismatches == ()
        assert not any(rows.isnan().any() for rows in comparison.replayed.values())


def _allowed(expected: torch.Tensor) -> torch.Tensor | float:
    return LOOSE.get(expected.dtype, 0.0) * (1 + expected.double().abs().nan_to_num(0, 0, 0))


def assert_same(one: Tensors, other: Tensors) -> None:
    """Assert that two outputs agree in every bit."""
    assert one.keys() == other.keys()
    for name, rows in one.items():
        assert torch.equal(rows, other[name]), name


@pytest.fixture(scope="session", name="assert_same")
def to_the_bit() -> Callable[[Tensors, Tensors], None]:
    return assert_same


@pytest.fixture(scope="session", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session", params=[1, 2], ids=["chain", "tree"])
def topk(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="session")
def target(device: str, topk: int) -> CaptureTarget:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = drafted_llama(device=device, dtype=dtype)
    return llama_target(model, topk=topk, max_batch_size=LARGEST)


@pytest.fixture(params=MODES, ids=lambda mode: mode.value)
def mode(request: pytest.FixtureRequest) -> ForwardMode:
    return request.param


@pytest.fixture(scope="session")
def capture_mode(target: CaptureTarget, device: str) -> Iterator[Callable[..., Captured]]:
    """Return ``capture_mode(mode, batch_sizes)``, which captures each combination once."""
    runners: dict[Any, Runner[Any, Any]] = {}

    def make(mode: ForwardMode, batch_sizes: tuple[int, ...] | None = None) -> Captured:
        key = mode, batch_sizes
        if key not in runners:
            runners[key] = target.runner(mode, batch_sizes=batch_sizes, device=device)
            runners[key].capture()
        return Captured(target, runners[key])

    yield make
    for runner in runners.values():
        runner.close()


@pytest.fixture
def capture(capture_mode: Callable[..., Captured], mode: ForwardMode) -> Callable[..., Captured]:
    """Return ``capture(*batch_sizes)``: a captured runner of the mode."""
    return lambda *batch_sizes: capture_mode(mode, batch_sizes or None)
