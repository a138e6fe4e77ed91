"""The script of ``tools/bench`` that a file tests."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[3] / "tools" / "bench"


@pytest.fixture
def bench(monkeypatch, request):
    """Return the script as a module: ``test_screen.py`` tests ``screen.py``."""
    monkeypatch.syspath_prepend(BENCH)
    return importlib.import_module(request.path.stem.removeprefix("test_"))
