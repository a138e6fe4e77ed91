"""Both backends, chain and tree, over a small model with random weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from graphkit.reference import LlamaConfig, LlamaModel, reference_target, save_checkpoint
from graphkit.runners import Output, Runner
from graphkit.spec import ForwardMode
from graphkit.targets import CaptureTarget

LARGEST = 32


@pytest.fixture(scope="session", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session", params=[1, 2], ids=["chain", "tree"])
def topk(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        tie_word_embeddings=False,
    )
    folder = tmp_path_factory.mktemp("tiny")
    save_checkpoint(LlamaModel(config), folder)
    return folder


@pytest.fixture(scope="session")
def target(device: str, topk: int, checkpoint: Path) -> CaptureTarget:
    return reference_target(device, topk=topk, max_batch_size=LARGEST, checkpoint=checkpoint)


@pytest.fixture
def verify(target: CaptureTarget, device: str) -> Callable[..., Runner]:
    """Make a captured TARGET_VERIFY runner (or one of another mode) with given sizes."""
    made: list[Runner] = []

    def make(batch_sizes: list[int] | None = None, mode=ForwardMode.TARGET_VERIFY) -> Runner:
        runner = target.runner(mode, batch_sizes=batch_sizes, device=device)
        made.append(runner)
        runner.capture()
        return runner

    yield make
    for runner in made:
        runner.close()


@pytest.fixture(scope="session")
def assert_right() -> Callable[[Runner, object, Output], None]:
    """Replay equals the padded path bit by bit, and eager within rounding."""

    def check(runner: Runner, batch: object, replayed: Output) -> None:
        replayed = replayed.clone()
        eager = runner.fall_back(batch)
        runner.shadow = "padded"
        padded = runner.replay(batch, clone=True)
        runner.shadow = None
        for name, rows in replayed.tensors().items():
            assert torch.equal(rows, padded.tensors()[name]), f"{name}: graph is not its own path"
            loose = 3e-2 if rows.dtype is torch.bfloat16 else 1e-4
            torch.testing.assert_close(
                rows,
                eager.tensors()[name],
                rtol=loose,
                atol=loose,
                msg=lambda m, n=name: f"{n}: {m}",
            )

    return check


@pytest.fixture(scope="session")
def poison() -> Callable[[Runner], None]:
    """Leave the worst in every input buffer: NaN in floats, the largest value in integers."""

    def spoil(runner: Runner) -> None:
        for tensor in runner.buffers.arena.tensors.values():
            if tensor.is_floating_point():
                tensor.fill_(torch.nan)
            elif tensor.dtype is torch.bool:
                tensor.fill_(False)
            else:
                tensor.fill_(torch.iinfo(tensor.dtype).max)

    return spoil
