"""CUDA kernels without a GPU: Triton's interpreter runs them in another process.

One process runs all files, since its start takes seconds.
"""

from pathlib import Path

import pytest

UNIT = Path(__file__).parents[1]
FILES = (
    *(
        path
        for room in ("attention", "ops")
        for path in sorted((UNIT / room).glob("test_*.py"))
        if "INTERPRETER" in path.read_text() and path.name != "test_interpreted.py"
    ),
    UNIT / "buffers" / "interpreted_refresh.py",
)


@pytest.mark.slow
def test_interpreted_kernels_agree_with_their_references(assert_interpreted_pass):
    assert_interpreted_pass(*FILES)
