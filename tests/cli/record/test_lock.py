"""``graphkit record --lock`` writes the graphs of a program, ``--check`` compares them."""

from __future__ import annotations

import json

import pytest

from graphkit.records import GraphBaseline

PROGRAM = """
import os
from fake_capture import environment, writer
from graphkit.records import GraphRecord, Node

name = os.environ.get("KERNEL", "gelu")
node = Node(index=0, kind="kernel", name=name, short_name=name, module="layers.0.mlp")
place = "engine/runner.py:12 in capture"
writer.write(lambda: GraphRecord(
    name=place, captured_at=place, backend="cuda", environment=environment, nodes=(node,)))
"""


@pytest.mark.slow
def test_a_changed_kernel_fails_the_check(program, record_in_shell, here, monkeypatch):
    script = program(PROGRAM)
    done = record_in_shell("--lock", "graphs.lock", "--", script)
    assert done.returncode == 0, done.stderr
    assert "locked 1 graph" in done.stderr
    assert len(GraphBaseline.load(here / "graphs.lock").graphs) == 1
    done = record_in_shell("--check", "graphs.lock", "--", script)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert "1 check, no finding." in done.stderr
    monkeypatch.setenv("KERNEL", "gelu_fast")
    done = record_in_shell("--check", "graphs.lock", "--json", "--", script)
    assert done.returncode == 1
    (found,) = json.loads(done.stdout)["findings"]
    assert (found["kernel"], found["module"]) == ("gelu_fast", "layers.0.mlp")


@pytest.mark.slow
def test_a_program_without_graphs_is_not_locked(program, record_in_shell, here):
    done = record_in_shell("--lock", "graphs.lock", "--", program("print(1)"))
    assert done.returncode == 3
    assert "nothing locked: the program did not import torch" in done.stderr
    assert not (here / "graphs.lock").exists()


@pytest.mark.slow
def test_a_second_run_that_fails_fails_the_command(program, record_in_shell, here):
    second = (
        "import pathlib, sys\nran = pathlib.Path('ran')\nsys.exit(5 * ran.exists() or ran.touch())"
    )
    done = record_in_shell("--lock", "graphs.lock", "--", program(PROGRAM + second))
    assert done.returncode == 5, done.stderr


@pytest.mark.parametrize("option", ["--lock", "--check"])
def test_a_record_that_would_not_be_written_is_refused(run, here, program, option):
    ended = run("record", option, "graphs.lock", "--out", "out.json", program("print(1)"))
    assert ended.code == 2
    assert "--out has no effect with --lock and --check" in ended.err


@pytest.mark.slow
@pytest.mark.parametrize("option", ["--every=2", "--find-fault", "--fail-on=error"])
def test_options_of_an_audit_are_refused(program, record_in_shell, option):
    done = record_in_shell("--check", "graphs.lock", option, "--", program("print(1)"))
    assert done.returncode == 2
    assert "applies to an audit" in done.stderr
