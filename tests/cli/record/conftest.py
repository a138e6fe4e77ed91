"""Programs that write graph files without a GPU, through the call that ends a capture."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from audited_runs import ROOT
from graphkit.records import ForeignRecord

FAKE_CAPTURE = """
from graphkit.records import Environment, GraphRecord
from graphkit.audit.foreign import GraphFileWriter

environment = Environment(
    device="a device", torch="2", triton="3", cuda="13", driver="580", graphkit="0"
)
writer = GraphFileWriter.from_environment()

def capture(name, meanwhile=lambda: None):
    def make():
        meanwhile()
        return GraphRecord(name=name, backend="cuda", environment=environment, nodes=())
    writer.write(make)
"""


@pytest.fixture
def program(here, tmp_path, monkeypatch):
    """Return ``program(source)``, which writes the script ``s.py`` to the working directory."""
    (tmp_path / "fake_capture.py").write_text(FAKE_CAPTURE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (tmp_path, ROOT))))

    def write(source):
        (here / "s.py").write_text(source)
        return "s.py"

    return write


@pytest.fixture
def graphs_in(here):
    """Return ``graphs_in(name)``: name and process index of each graph in a record."""

    def read(name="graphkit-record.json"):
        record = ForeignRecord.load(here / name)
        return [(graph.name, graph.process) for graph in record.graphs]

    return read


@pytest.fixture
def record_in_shell(here):
    """Return ``record_in_shell(*arguments)``, which runs the command in its own process."""

    def command(*arguments, options=(), **settings):
        return subprocess.run(
            [sys.executable, *options, "-m", "graphkit", "record", *arguments],
            capture_output=True, text=True, check=False, timeout=300, **settings,
        )  # fmt: skip

    return command
