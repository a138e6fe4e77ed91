"""The programs that GPU tests audit run on a CPU, where they capture nothing, and are complete."""

from __future__ import annotations

import runpy
import warnings

import pytest
import torch

from foreign_programs import FAULTS, GENERATE, batching

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU tests run them"),
]


@pytest.fixture
def printed(tmp_path, capsys):
    """Return ``printed(text)``: the lines that a program prints in this process."""

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


@pytest.mark.parametrize("fault", ["freed input", "replaced static tensor", "stale pool read"])
def test_a_program_with_a_planted_fault_runs_on_a_cpu(printed, fault):
    assert len(printed(batching(fault))) == 2


def test_generate_prints_the_same_twice(printed):
    first, second = printed(GENERATE)
    assert first == second
