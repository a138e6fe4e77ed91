"""``GRAPHKIT_AUDIT`` alone audits any Python that imports torch, and changes no other Python."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from audited_runs import installed

pytestmark = pytest.mark.slow

IS_FOLLOWED = (
    "import torch, sys; print(hasattr(torch.cuda.CUDAGraph, '_graphkit_followed'), "
    "'graphkit.recording' in sys.modules)"
)


@pytest.fixture
def start(tmp_path):
    """Return ``start(code, **environment)``: a Python with an installed graphkit."""
    plain = {name: text for name, text in os.environ.items() if not name.startswith("GRAPHKIT")}
    path = installed(tmp_path / "installed")

    def run(code, **environment):
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False,
            env={**plain, "PYTHONPATH": path, **environment},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done

    return run


def test_graphs_are_followed_where_the_variable_is_set(start, tmp_path):
    done = start(IS_FOLLOWED, GRAPHKIT_AUDIT="r.json")
    assert (done.stdout, done.stderr) == ("True True\n", "")
    assert not (tmp_path / "r.json").exists(), "no graph was captured"


@pytest.mark.parametrize("value", [None, ""])
def test_without_the_variable_torch_is_left_alone(start, tmp_path, value):
    done = start(IS_FOLLOWED, **({} if value is None else {"GRAPHKIT_AUDIT": value}))
    assert (done.stdout, done.stderr) == ("False False\n", "")
    assert [path.name for path in tmp_path.iterdir()] == ["installed"]


def test_a_python_without_torch_imports_nothing(start, tmp_path):
    code = "import sys; print([name for name in sys.modules if 'graphkit' in name.lower()])"
    done = start(code, GRAPHKIT_AUDIT="r.json")
    assert "graphkit.autoload" not in done.stdout
    assert "graphkit.recording" not in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["installed"]


def test_a_child_in_another_folder_has_the_same_report(start, tmp_path):
    child = "import torch, os; print(os.environ['GRAPHKIT_AUDIT'])"
    code = (
        "import os, subprocess, sys, torch; os.mkdir('other'); "
        f"subprocess.run([sys.executable, '-c', {child!r}], cwd='other', check=True)"
    )
    assert start(code, GRAPHKIT_AUDIT="r.json").stdout == f"{tmp_path / 'r.json'}\n"
    assert not list((tmp_path / "other").iterdir())


def test_an_audit_that_cannot_begin_leaves_torch_usable(start, tmp_path):
    (tmp_path / "r.json.processes").touch()  # where the folder should be
    done = start("import torch; print(torch.ones(2).sum())", GRAPHKIT_AUDIT="r.json")
    assert done.stdout == "tensor(2.)\n"
    assert done.stderr.startswith("graphkit audit: process ")
    assert "is not audited: " in done.stderr
    assert done.stderr.count("\n") == 1
