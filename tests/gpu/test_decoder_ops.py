"""Kernels of decoder layers on CUDA against their references on the CPU."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.gpu
CASES = runpy.run_path(str(Path(__file__).parents[1] / "unit" / "ops" / "decoder_cases.py"))


def test_kernels_match_the_references():
    def on_cpu(each):
        return each.cpu() if isinstance(each, torch.Tensor) else each

    for op, args in CASES["cases"](torch.device("cuda")):
        got = op(*args)
        got = tuple(map(on_cpu, got)) if isinstance(got, tuple) else on_cpu(got)
        CASES["assert_close"](got, op(*map(on_cpu, args)))
