"""The innermost user line of a stack: neither of torch nor of graphkit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import graphkit
from graphkit import ForwardMode, capture_target
from graphkit.graphs import Stage
from graphkit.graphs.source_lines import caller_line, caller_location, is_internal
from graphkit.models.reference import reference_target

PACKAGE = Path(graphkit.__file__).parent


def compiled(path, source):
    """The names that a source defines, compiled under a file name."""
    space = {"caller_line": caller_line, "caller_location": caller_location, "torch": torch}
    exec(compile(source, str(path), "exec"), space)
    return space


def test_a_caller_line_has_folder_file_and_function(tmp_path):
    path = tmp_path / "models" / "llama.py"
    space = compiled(path, "def forward():\n    return caller_line()")
    assert space["forward"]() == "models/llama.py:2 in forward"


def test_a_caller_location_has_path_and_text(tmp_path):
    path = tmp_path / "model.py"
    source = "def forward():\n    return  caller_location()\n"
    path.write_text(source)
    assert compiled(path, source)["forward"]() == f"{path}:2 `return  caller_location()`"
    assert compiled(tmp_path / "gone.py", source)["forward"]().endswith("gone.py:2 ``")


def test_internal_frames_are_skipped(tmp_path):
    call = "def through(function):\n    return function()"
    torchs = compiled(Path(torch.__file__).parent / "nn" / "made_up.py", call)["through"]
    ours = compiled(PACKAGE / "runners" / "made_up.py", call)["through"]
    generated = compiled("<eval_with_key>.3", call)["through"]
    users = compiled(tmp_path / "a" / "users.py", call)["through"]
    found = users(lambda: torchs(lambda: ours(lambda: generated(caller_line))))
    assert found.endswith(f"walk/{Path(__file__).name}:{line_of('found = ')} in <lambda>")
    assert torchs(lambda: ours(caller_line)).endswith(" in <lambda>")


def line_of(text):
    lines = Path(__file__).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.strip().startswith(text))


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (Path(torch.__file__), True),
        (f"{Path(torch.__file__).parent}vision/model.py", False),
        (PACKAGE / "graphs" / "recorder.py", True),
        (PACKAGE / "runners" / "runner.py", True),
        (PACKAGE.parent / "runners" / "runner.py", True),  # where the package links to
        (PACKAGE / "spec" / "config.py", True),
        (PACKAGE / "engine" / "step" / "eagle.py", True),
        (PACKAGE / "models" / "heads" / "layers.py", False),
        ("/home/graphs/model.py", False),
        ("<string>", True),
    ],
    ids=str,
)
def test_internal_files(path, expected):
    assert is_internal(str(path)) is expected
    is_own = isinstance(path, Path) and path.is_relative_to(PACKAGE.parent)
    assert not is_own or path.exists(), "a file of graphkit has moved"


@pytest.mark.slow
def test_nodes_of_a_step_have_the_lines_of_drafters_and_models():
    target = reference_target(device="cpu", max_batch_size=2)
    record = capture_target(
        target, modes=[ForwardMode.STEP], batch_sizes=[2], device="cpu", inspect=True
    )
    (graph,) = record.graphs
    around = (Stage.REFRESH, Stage.METADATA, Stage.STEP)
    files = {node.source.partition(":")[0] for node in graph.nodes if node.module not in around}
    assert {"step/eagle.py", "step/verifier.py", "heads/eagle.py"} <= files
    folders = {file.partition("/")[0] for file in files}
    assert folders == {"step", "heads", "llama"}
    assert graph.captured_at.startswith(f"walk/{Path(__file__).name}:")


def test_frames_outside_of_the_command_are_not_shown(tmp_path):
    source = "def through(function):\n    return function()"
    command = compiled(PACKAGE / "cli" / "capture.py", source)
    command["__name__"] = "graphkit.cli.capture"
    users = compiled(tmp_path / "models" / "llama.py", source)["through"]
    assert command["through"](caller_line) == ""
    assert command["through"](lambda: users(caller_line)) == "models/llama.py:2 in through"


def test_a_stack_without_a_user_line(monkeypatch):
    monkeypatch.setattr("graphkit.graphs.source_lines.is_internal", lambda _filename: True)
    assert (caller_line(), caller_location()) == ("", "an unknown line")
