"""What a recorded Python does before the program begins."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module

import pytest

from graphkit.audit.foreign.launch import STARTUP

PRINT_STATE = "import json, sys; print(json.dumps([sys.path, sorted(sys.modules), sys.argv]))"


def state_of(done):
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    path, modules, arguments = json.loads(done.stdout)
    return path, set(modules), arguments


def plain(code, folder, **extra):
    return subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=extra or None,
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_a_program_without_torch_sees_no_difference(start, tmp_path):
    path, modules, arguments = state_of(start(PRINT_STATE))
    plain_path, plain_modules, plain_arguments = state_of(plain(PRINT_STATE, tmp_path))
    assert (path, arguments) == (plain_path, plain_arguments)
    assert modules - plain_modules <= {"sitecustomize"}
    assert list(start.folder.iterdir()) == []


def test_child_processes_are_hooked_too(start):
    look = "import sys; print([type(finder).__name__ for finder in sys.meta_path][0])"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {look!r}])\n{look}"
    assert start(code).stdout.split() == ["_TorchFinder", "_TorchFinder"]


def test_the_programs_own_sitecustomize_is_run_too(start, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "sitecustomize.py").write_text("import sys; sys.other_ran = __file__")
    code = "import sys, sitecustomize; print(sys.other_ran, sitecustomize.__file__)"
    env = f"{STARTUP}:{other}"
    assert start(code, PYTHONPATH=env).stdout.split() == [str(other / "sitecustomize.py")] * 2


def test_its_errors_are_shown_as_python_shows_them(start, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "sitecustomize.py").write_text("import no_such_module_at_all")
    done = start("print('runs')", PYTHONPATH=f"{STARTUP}:{other}")
    without = plain("print('runs')", tmp_path, PYTHONPATH=str(other))
    assert done.stdout == without.stdout == "runs\n"
    assert done.stderr.splitlines()[-1] == without.stderr.splitlines()[-1]
    assert "no_such_module_at_all" in done.stderr


@pytest.mark.slow
def test_the_graphs_of_torch_are_observed(start):
    code = (
        "import sys, torch\n"
        "from torch.cuda import CUDAGraph, graphs\n"
        "assert graphs.CUDAGraph is CUDAGraph\n"
        "print(*(hasattr(getattr(CUDAGraph, name), '__wrapped__')\n"
        "        for name in ('__init__', 'capture_begin', 'capture_end', 'replay')))\n"
        "print([type(finder).__name__ for finder in sys.meta_path].count('_TorchFinder'))\n"
        "print('graphkit.graphs' in sys.modules)\n"
    )
    done = start(code)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == [*["True"] * 3, "False", "0", "False"]
    assert [path.name for path in start.folder.iterdir()] == ["torch"]


def test_an_error_in_the_hooks_is_printed_and_the_program_continues(start, tmp_path):
    """Use a torch that is too old to keep a graph's template."""
    package = tmp_path / "torch" / "cuda"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").write_text("from torch.cuda.graphs import CUDAGraph")
    (package / "graphs.py").write_text("class CUDAGraph: pass")
    done = start("import os, sys, torch.cuda; print(os.getpid(), torch.cuda.CUDAGraph, sys.path)")
    pid, _, rest = done.stdout.partition(" ")
    assert done.returncode == 0
    assert rest.startswith("<class 'torch.cuda.graphs.CUDAGraph'> ['', ")
    assert done.stderr == (
        f"graphkit record: process {pid} is not recorded: this version of torch cannot keep the "
        "template of a graph. Use torch 2.11 or newer.\n"
    )


def test_a_missing_module_of_torch_is_still_missing(start, tmp_path):
    (tmp_path / "torch" / "cuda").mkdir(parents=True)
    for folder in ("torch", "torch/cuda"):
        (tmp_path / folder / "__init__.py").touch()
    done = start("try: import torch.cuda.graphs\nexcept ImportError as error: print(error.name)")
    assert (done.stdout, done.stderr) == ("torch.cuda.graphs\n", "")


def test_the_folder_hides_no_other_module():
    """It is the first entry on the path of every Python of the program."""
    names = {path.name for path in STARTUP.iterdir()} - {"__pycache__"}
    assert names == {"__init__.py", "sitecustomize.py"}


def test_an_import_under_the_full_name_installs_nothing():
    before = list(sys.meta_path), list(sys.path)
    import_module("graphkit.audit.foreign.startup.sitecustomize")
    assert (sys.meta_path, sys.path) == before
