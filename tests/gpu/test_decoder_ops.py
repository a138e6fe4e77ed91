"""Kernels of decoder layers on CUDA against their references on the CPU."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch

from graphkit.ops.decoder import rotated_heads, store_rotated_heads
from graphkit.ops.kv_cache import store_kv

pytestmark = pytest.mark.gpu
CASES = runpy.run_path(str(Path(__file__).parents[1] / "unit" / "ops" / "decoder_cases.py"))


def test_kernels_match_the_references():
    def on_cpu(each):
        return each.cpu() if isinstance(each, torch.Tensor) else each

    for op, args in CASES["cases"](torch.device("cuda")):
        got = op(*args)
        got = tuple(map(on_cpu, got)) if isinstance(got, tuple) else on_cpu(got)
        CASES["assert_close"](got, op(*map(on_cpu, args)))


def test_heads_are_stored_as_by_two_kernels():
    for caches, slots, scales, rotation in CASES["store_cases"](torch.device("cuda"), outside=True):
        expected = CASES["copies"](caches)
        query, key, value = rotated_heads(*rotation)
        store_kv(*expected, slots, key, value, *scales)
        assert torch.equal(store_rotated_heads(*caches, slots, *rotation, *scales), query)
        for got, other in zip(caches, expected, strict=True):
            assert torch.equal(got.float(), other.float())
