"""Tests of ops: those that are marked ``interpreted`` run in Triton's interpreter alone."""

from __future__ import annotations

import os
from pathlib import Path

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items):
    is_interpreter = os.environ.get("TRITON_INTERPRET") == "1"
    items[:] = [
        item
        for item in items
        if item.path.parent != HERE
        or bool(item.get_closest_marker("interpreted")) == is_interpreter
    ]
