"""Graphs to be recorded, and Pythons that are recorded."""

from __future__ import annotations

import subprocess
import sys

import pytest

from graphkit.recording.launch import environment_for
from graphkit.records import Environment, GraphRecord, Node


@pytest.fixture
def graph_of():
    """``graph_of(name)``: a small record of a graph."""

    def make(name):
        environment = Environment(
            device="a device", torch="2", triton="3", cuda="13", driver="580", graphkit="0"
        )
        node = Node(index=0, kind="kernel", name="f(int)", short_name="f")
        return GraphRecord(name=name, backend="cuda", environment=environment, nodes=(node,))

    return make


@pytest.fixture
def start(tmp_path):
    """``start(code, *words, **environment)``: a recorded Python that runs it to its end."""
    parts = tmp_path / "parts"
    parts.mkdir()

    def run(code, *options, **extra):
        return subprocess.run(
            [sys.executable, *options, "-c", code],
            env={**environment_for(parts), **extra}, cwd=tmp_path,
            capture_output=True, text=True, check=False,
        )  # fmt: skip

    run.parts = parts
    return run
