"""CUDA kernels of attention without a GPU: Triton's interpreter runs them in another process.

TRITON_INTERPRET must be set before triton is imported, which this process may have done.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FILES = (HERE / "interpreted_kernels.py", HERE / "interpreted_stores.py")


@pytest.mark.slow
def test_interpreted_kernels_agree_with_their_references():
    command = [sys.executable, "-m", "pytest", *map(str, FILES), "-q", "-p", "no:cacheprovider"]
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTEST_ADDOPTS": ""}
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
