"""CUDA kernels of attention without a GPU: Triton's interpreter runs them in another process."""

from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.slow
def test_interpreted_kernels_agree_with_their_references(assert_interpreted_pass):
    assert_interpreted_pass(HERE / "interpreted_kernels.py", HERE / "interpreted_stores.py")
