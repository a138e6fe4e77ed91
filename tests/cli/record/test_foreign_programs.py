"""The programs that GPU tests audit run on a CPU, where they capture nothing, and are complete."""

from __future__ import annotations

import pytest

from audited_runs import Program
from foreign_programs import FAULTS, GENERATE, batching

pytestmark = pytest.mark.slow


def test_every_fault_is_planted_in_a_program_of_its_own():
    texts = {batching(name) for name in ("", *FAULTS)}
    assert len(texts) == len(FAULTS) + 1
    for text in texts:
        compile(text, "program.py", "exec")


def test_continuous_batching_generates_the_same_texts_twice(tmp_path):
    done = Program(tmp_path, batching()).run()
    assert done.returncode == 0, done.stderr
    tokens = [line.partition(" ")[2] for line in done.stdout.splitlines()]
    assert len(tokens) == 6, done.stderr
    assert tokens[:3] == tokens[3:]


def test_a_planted_fault_leaves_the_program_running_on_a_cpu(tmp_path):
    """A replaced tensor is read where nothing is captured, and doubles logits: the same texts."""
    done = Program(tmp_path, batching("replaced static tensor")).run()
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 2


def test_generate_prints_the_same_twice(tmp_path):
    done = Program(tmp_path, GENERATE).run()
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first == second
