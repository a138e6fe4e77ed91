"""All modes on both backends, chain and tree, over small models with random weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from graphkit.buffers import Axis
from graphkit.reference import EagleHead, LlamaConfig, LlamaModel, MTPHead
from graphkit.reference.target import model_target
from graphkit.runners import Runner
from graphkit.spec import ForwardMode
from graphkit.targets import RUNNERS, CaptureTarget
from graphkit.targets.lockstep import Lockstep

Tensors = dict[str, torch.Tensor]
LARGEST = 32
SIZES = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class Captured:
    """A captured runner of one mode, with batches for it."""

    target: CaptureTarget
    runner: Runner[Any]
    lockstep: Lockstep

    def batch(self, live: int, seed: int) -> Any:
        """A live batch."""
        return self.target.batch(self.runner.mode, live, seed)

    def rows(self, axis: Axis, batch: Any) -> int:
        """Live rows of an axis."""
        return self.runner.buffers.capacity.rows(axis, batch.batch_size, batch.num_tokens)

    def poison(self) -> None:
        """Leave the worst in every input buffer: NaN in floats, the largest value in integers."""
        for tensor in self.runner.buffers.arena.tensors.values():
            if tensor.is_floating_point():
                tensor.fill_(torch.nan)
            elif tensor.dtype is torch.bool:
                tensor.fill_(False)
            else:
                tensor.fill_(torch.iinfo(tensor.dtype).max)

    def replay(self, batch: Any, size: int | None = None) -> Tensors:
        """What a replay gives, as tensors that last."""
        return self.runner.replay(batch, padded_batch_size=size, clone=True).tensors()

    def assert_right(self, batch: Any, size: int | None = None) -> None:
        """A replay is its padded path bit by bit, and eager along that path within rounding."""
        replayed = self.replay(batch, size)
        self.runner.shadow = "padded"
        with self.lockstep.lead():
            padded = self.replay(batch, size)
        self.runner.shadow = None
        assert_same(replayed, padded)
        with self.lockstep.follow() as meetings:
            eager = self.runner.fall_back(batch).tensors()
        for meeting in meetings:
            assert_close(meeting.led, meeting.made)
        assert_close(replayed, eager)


def assert_same(one: Tensors, other: Tensors) -> None:
    """To the bit."""
    assert one.keys() == other.keys()
    for name, rows in one.items():
        assert torch.equal(rows, other[name]), name


def assert_close(one: Tensors, other: Tensors) -> None:
    """Numbers within rounding, tokens and places in a tree to the bit."""
    assert one.keys() == other.keys()
    for name, rows in one.items():
        loose = {torch.bfloat16: 3e-2, torch.float32: 1e-4}.get(rows.dtype, 0.0)
        torch.testing.assert_close(
            rows, other[name], rtol=loose, atol=loose, msg=lambda m, n=name: f"{n}: {m}"
        )


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
    torch.manual_seed(7)
    model = LlamaModel(LlamaConfig(num_hidden_layers=2, **SIZES))
    eagle = EagleHead(LlamaConfig(num_hidden_layers=1, **SIZES), model)
    mtp = MTPHead(LlamaConfig(num_hidden_layers=3, **SIZES), model)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    for module in (model, eagle, mtp):
        module.to(device, dtype).requires_grad_(False)
    return model_target(model, eagle, mtp, name="tiny", topk=topk, max_batch_size=LARGEST)


@pytest.fixture(params=RUNNERS, ids=lambda mode: mode.value)
def mode(request: pytest.FixtureRequest) -> ForwardMode:
    return request.param


@pytest.fixture
def capture_mode(target: CaptureTarget, device: str) -> Iterator[Callable[..., Captured]]:
    """``capture_mode(mode, batch_sizes)``; closed afterwards."""
    made: list[Captured] = []

    def make(mode: ForwardMode, batch_sizes: list[int] | None = None) -> Captured:
        lockstep = Lockstep()
        runner = lockstep.watch(target).runner(mode, batch_sizes=batch_sizes, device=device)
        made.append(Captured(target, runner, lockstep))
        runner.capture()
        return made[-1]

    yield make
    for captured in made:
        captured.runner.close()


@pytest.fixture
def capture(
    capture_mode: Callable[..., Captured], mode: ForwardMode
) -> Callable[[list[int] | None], Captured]:
    """``capture(batch_sizes)``: in every mode in turn."""
    return lambda batch_sizes=None: capture_mode(mode, batch_sizes)
