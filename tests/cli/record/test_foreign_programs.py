"""The programs that GPU tests audit run on a CPU, where they capture nothing, and are complete."""

from __future__ import annotations

import runpy
import warnings

import pytest
import torch

from foreign_programs import FAULTS, GENERATE, batching

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU tests run them")


@pytest.fixture
def printed(tmp_path, capsys, monkeypatch):
    """Return ``printed(text)``: the lines that a program prints in this process."""
    for name in ("capture_end", "replay"):  # programs with a fault replace them
        monkeypatch.setattr(torch.cuda.CUDAGraph, name, getattr(torch.cuda.CUDAGraph, name))

    def run(text):
        path = tmp_path / "program.py"
        path.write_text(text)
        with warnings.catch_warnings(), torch.random.fork_rng():
            warnings.simplefilter("ignore")
            runpy.run_path(str(path))
        return capsys.readouterr().out.splitlines()

    return run


def test_every_fault_is_planted_in_a_program_of_its_own():
    texts = {batching(name) for name in ("", *FAULTS)}
    assert len(texts) == len(FAULTS) + 1
    for text in texts:
        compile(text, "program.py", "exec")


def test_continuous_batching_generates_the_same_texts_twice(printed):
    tokens = [line.partition(" ")[2] for line in printed(batching())]
    assert len(tokens) == 6
    assert tokens[:3] == tokens[3:]


@pytest.mark.parametrize(
    "fault", ["freed input", "replaced buffer", "stale pool read", "frozen temperature"]
)
def test_a_program_with_a_planted_fault_runs_on_a_cpu(printed, fault):
    *texts, planted = printed(batching(fault))
    assert len(texts) == 2
    assert planted.startswith("planted: True 0 of 0 ")


def test_generate_prints_the_same_twice(printed):
    first, second = printed(GENERATE)
    assert first == second
