"""Runs of one program, plainly and under ``graphkit record --audit``."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

import graphkit
from graphkit.records import AuditReport

ROOT = Path(graphkit.__file__).parents[1]
_SHOWN = 400
"""Characters of a process's output in the message of an assertion, from its end."""


def import_path(*folders: Path) -> str:
    """Return a PYTHONPATH of folders, this checkout, and what the present process imports from."""
    present = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join([*map(str, (*folders, ROOT)), *filter(None, present)])


def installed(folder: Path) -> str:
    """Return a PYTHONPATH where graphkit is installed, as far as its entry points are concerned."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    metadata = folder / "graphkit_cuda-0.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: graphkit-cuda\nVersion: 0\n")
    groups = [
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in names.items())
        for group, names in project["entry-points"].items()
    ]
    (metadata / "entry_points.txt").write_text("".join(groups))
    return import_path(folder)


@dataclass
class AuditedRun:
    """A run that has ended: its process, and the report."""

    done: subprocess.CompletedProcess[str]
    report: AuditReport

    def __str__(self) -> str:
        """Return the run as text for the message of an assertion, the most important last.

        pytest shortens other objects than strings.
        """
        checks = [f"{each.audit} {each.mode}: {each.text}" for each in self.report.checks]
        findings = [
            f"{each.severity}: {each.kind} {each.names} `{each.kernel}` {each.source}: {each.text}"
            for each in self.report.findings
        ]
        return "\n".join(
            (
                self.done.stderr[-_SHOWN:], *dict.fromkeys(checks), *reversed(findings),
                self.done.stdout[-_SHOWN:], f"exit {self.done.returncode}",
            )
        )  # fmt: skip


class Program:
    """A program in a folder of its own.

    Args:
        folder: The folder.
        text: The text of ``program.py``.
    """

    def __init__(self, folder: Path, text: str) -> None:
        self.folder, self.text = folder, text
        folder.mkdir(exist_ok=True)
        (folder / "program.py").write_text(text)

    def run(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run Python with these arguments, by default the program."""
        return subprocess.run(
            [sys.executable, *(arguments or ("program.py",))], cwd=self.folder,
            env={**os.environ, "PYTHONPATH": installed(self.folder / "installed"), **variables},
            capture_output=True, text=True, check=False,
        )  # fmt: skip

    def audit(self, *options: str) -> AuditedRun:
        """Run the program under the audit."""
        done = self.run(
            "-m", "graphkit", "record", "--audit", "--out", "r.json", *options, "program.py"
        )
        assert (self.folder / "r.json").exists(), done.stderr
        assert "is incomplete" not in done.stderr, done.stderr
        return AuditedRun(done, AuditReport.load(self.folder / "r.json"))

    def line(self, mark: str) -> int:
        """Return the number of the first line that contains a mark."""
        lines = self.text.splitlines()
        return next(number for number, line in enumerate(lines, 1) if mark in line)
