"""CUDA kernels without a GPU: Triton's interpreter runs them in another process.

One process runs all files, since its start takes seconds.
"""

from pathlib import Path

import pytest

HERE = Path(__file__).parent
OPS = sorted(path for path in HERE.glob("test_*.py") if "INTERPRETER" in path.read_text())
FILES = (
    *(path for path in OPS if path.name != "test_interpreted.py"),
    HERE.parent / "attention" / "interpreted_fp8.py",
    HERE.parent / "attention" / "interpreted_kernels.py",
    HERE.parent / "attention" / "interpreted_stores.py",
    HERE.parent / "buffers" / "interpreted_refresh.py",
)


@pytest.mark.slow
def test_interpreted_kernels_agree_with_their_references(assert_interpreted_pass):
    assert_interpreted_pass(*FILES)
