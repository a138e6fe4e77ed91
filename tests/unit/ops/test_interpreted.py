"""CUDA kernels without a GPU: Triton's interpreter runs those of trees, slots, samples, refresh.

TRITON_INTERPRET must be set before triton is imported, so another process runs the tests. It runs
all files, since its start takes seconds. Attention has a process of its own, for another worker.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FILES = (
    HERE / "interpreted_philox.py",
    HERE / "interpreted_slots.py",
    HERE / "interpreted_tree.py",
    HERE.parent / "buffers" / "interpreted_refresh.py",
)


@pytest.mark.slow
def test_interpreted_kernels_agree_with_their_references():
    command = [sys.executable, "-m", "pytest", *map(str, FILES), "-q", "-p", "no:cacheprovider"]
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTEST_ADDOPTS": ""}
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
