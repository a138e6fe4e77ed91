"""The CUDA kernels without a GPU: Triton's interpreter runs them in a process of its own.

TRITON_INTERPRET must be set before triton is imported, which this process may have done already.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.parametrize("file", ["interpreted_kernels.py", "interpreted_stores.py"])
def test_interpreted_kernels_agree_with_their_references(file):
    script = Path(__file__).with_name(file)
    command = [sys.executable, "-m", "pytest", str(script), "-q", "-p", "no:cacheprovider"]
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTEST_ADDOPTS": ""}
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
