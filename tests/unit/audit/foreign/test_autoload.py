"""``GRAPHKIT_AUDIT`` alone audits any Python that imports torch, and changes no other Python."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from audited_runs import installed

IS_FOLLOWED = (
    "import torch, sys; print(hasattr(torch.cuda.CUDAGraph, '_graphkit_followed'), "
    "'graphkit.audit.foreign' in sys.modules)"
)


@pytest.fixture
def start(tmp_path):
    """Return ``start(code, **environment)``: a Python with an installed graphkit."""
    plain = {name: text for name, text in os.environ.items() if not name.startswith("GRAPHKIT")}
    path = installed(tmp_path / "installed")

    def run(code, returncode=0, **environment):
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False,
            env={**plain, "PYTHONPATH": path, **environment},
        )  # fmt: skip
        assert done.returncode == returncode, done.stderr
        return done

    return run


@pytest.mark.slow
def test_a_process_and_its_child_in_another_folder_are_followed(start, tmp_path):
    code = (
        f"import os, subprocess, sys; {IS_FOLLOWED}; os.mkdir('other'); "
        f"child = {IS_FOLLOWED!r} + '; import os; print(os.environ[\"GRAPHKIT_AUDIT\"])'; "
        "subprocess.run([sys.executable, '-c', child], cwd='other', check=True)"
    )
    done = start(code, GRAPHKIT_AUDIT="r.json", PYTHONUNBUFFERED="1")
    assert done.stdout.splitlines() == ["True True", "True True", str(tmp_path / "r.json")]
    assert done.stderr == ""
    assert not list((tmp_path / "other").iterdir())
    assert not (tmp_path / "r.json").exists(), "no graph was captured"


@pytest.mark.slow
def test_without_a_value_torch_is_left_alone(start, tmp_path):
    done = start(IS_FOLLOWED, GRAPHKIT_AUDIT="")
    assert (done.stdout, done.stderr) == ("False False\n", "")
    assert [path.name for path in tmp_path.iterdir()] == ["installed"]


def test_a_python_without_torch_imports_nothing(start, tmp_path):
    code = "import sys; print([name for name in sys.modules if 'graphkit' in name.lower()])"
    done = start(code, GRAPHKIT_AUDIT="r.json")
    assert "graphkit.autoload" not in done.stdout
    assert "graphkit.audit.foreign" not in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["installed"]


@pytest.mark.slow
def test_an_audit_that_cannot_begin_leaves_torch_usable(start, tmp_path):
    (tmp_path / "r.json.processes").touch()  # where the folder should be
    done = start("import torch; print(torch.ones(2).sum())", GRAPHKIT_AUDIT="r.json")
    assert done.stdout == "tensor(2.)\n"
    assert done.stderr.startswith("graphkit audit: process ")
    assert "is not audited: " in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize("report", ["folder", "/dev/null/r.json", "/proc/none/r.json"])
def test_a_report_that_cannot_be_written_ends_the_process(start, tmp_path, report):
    (tmp_path / "folder").mkdir()
    done = start("import torch; print('ran')", returncode=2, GRAPHKIT_AUDIT=report)
    assert done.stdout == ""
    assert "is not audited: GRAPHKIT_AUDIT names " in done.stderr
    assert "which cannot be written: " in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
def test_a_recorded_process_observes_the_captures_of_torch(start, tmp_path):
    code = (
        "from torch.cuda import CUDAGraph\n"
        "print(*(hasattr(getattr(CUDAGraph, name), '__wrapped__')\n"
        "        for name in ('__init__', 'capture_begin', 'capture_end', 'replay')))\n"
        "import sys; print('graphkit.audit.foreign.audits' in sys.modules)"
    )
    (tmp_path / "graphs").mkdir()
    done = start(code, GRAPHKIT_RECORDING=str(tmp_path / "graphs"))
    assert (done.stdout.split(), done.stderr) == ([*["True"] * 3, "False", "False"], "")
    assert [path.name for path in (tmp_path / "graphs").iterdir()] == ["torch"]


@pytest.mark.slow
def test_audits_and_commands_need_no_transformers(start):
    """An audited program may have none, and its import takes seconds and writes to stderr."""
    start(
        "import sys; sys.modules['transformers'] = None\n"
        "import graphkit.audit.foreign.audits.program_audit, graphkit.audit.report, graphkit.cli\n"
        "import graphkit.testing, graphkit.audit.wrong_outputs, graphkit.audit.rows.sequences"
    )


@pytest.mark.slow
def test_a_torch_that_cannot_keep_graphs_is_not_recorded_and_continues(start, tmp_path):
    code = (
        "import sys, types, graphkit.autoload as autoload\n"
        "graphs = sys.modules['torch.cuda.graphs'] = types.SimpleNamespace(CUDAGraph=object)\n"
        "autoload.begin_audit(); print('runs')"
    )
    done = start(code, GRAPHKIT_RECORDING=str(tmp_path))
    assert done.stdout == "runs\n"
    assert done.stderr.startswith("graphkit record: process ")
    assert done.stderr.endswith("Use torch 2.11 or newer.\n")
