"""Tests of ops: those that are marked ``interpreted`` run in Triton's interpreter alone."""

from __future__ import annotations

import os
from pathlib import Path

HERE = Path(__file__).parent


def pytest_collection_modifyitems(config, items):
    is_interpreter = os.environ.get("TRITON_INTERPRET") == "1"
    left_out = [
        item
        for item in items
        if item.path.parent == HERE
        and bool(item.get_closest_marker("interpreted")) != is_interpreter
    ]
    config.hook.pytest_deselected(items=left_out)
    excluded = set(map(id, left_out))
    items[:] = [item for item in items if id(item) not in excluded]
