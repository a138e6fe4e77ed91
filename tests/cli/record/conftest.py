"""Programs that record, though nothing can be captured here.

They write parts by the call that the end of a capture makes.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from graphkit.records import RecordingRecord

CAPTURING = """
from graphkit.records import Environment, GraphRecord
from graphkit.recording import GraphFileWriter

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
    """``program(source)``: the script ``s.py`` in the working directory."""
    (tmp_path / "capturing.py").write_text(CAPTURING)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def write(source):
        (here / "s.py").write_text(source)
        return "s.py"

    return write


@pytest.fixture
def graphs_in(here):
    """``graphs_in(name)``: names and process indices of what a record holds."""

    def read(name="graphkit-record.json"):
        record = RecordingRecord.load(here / name)
        return [(graph.name, graph.process) for graph in record.graphs]

    return read


@pytest.fixture
def record_in_shell(here):
    """``record_in_shell(*words)``: the command in a process of its own."""

    def command(*words, options=(), **settings):
        return subprocess.run(
            [sys.executable, *options, "-m", "graphkit", "record", *words],
            capture_output=True, text=True, check=False, timeout=60, **settings,
        )  # fmt: skip

    return command
