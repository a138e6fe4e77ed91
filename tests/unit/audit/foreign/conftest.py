"""Small graph records, and recorded Python processes."""

from __future__ import annotations

import subprocess
import sys

import pytest

from graphkit.audit.foreign.launch import environment_for
from graphkit.records import Environment, GraphRecord, Node


@pytest.fixture
def graph_of():
    """Return ``graph_of(name)``, which makes a small record of a graph."""

    def make(name):
        environment = Environment(
            device="a device", torch="2", triton="3", cuda="13", driver="580", graphkit="0"
        )
        node = Node(index=0, kind="kernel", name="f(int)", short_name="f")
        return GraphRecord(name=name, backend="cuda", environment=environment, nodes=(node,))

    return make


@pytest.fixture
def start(tmp_path):
    """Return ``start(code, *options, **environment)``: runs a recorded Python to its end."""
    folder = tmp_path / "graph files"
    folder.mkdir()

    def run(code, *options, **extra):
        return subprocess.run(
            [sys.executable, *options, "-c", code],
            env={**environment_for(folder), **extra}, cwd=tmp_path,
            capture_output=True, text=True, check=False,
        )  # fmt: skip

    run.folder = folder
    return run
