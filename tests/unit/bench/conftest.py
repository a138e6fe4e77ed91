"""The script of ``tools/bench`` that a file tests."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[3] / "tools" / "bench"


@pytest.fixture
def bench(monkeypatch, request):
    """Return the script as a module: that of a parameter, or of the file of the test."""
    monkeypatch.syspath_prepend(BENCH)
    name = getattr(request, "param", request.path.stem.removeprefix("test_"))
    return importlib.import_module(name)
