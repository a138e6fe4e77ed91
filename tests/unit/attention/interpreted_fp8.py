"""Kernels over caches of float8_e4m3fn against their references. ``test_interpreted`` runs them."""

from __future__ import annotations

import os
import runpy
from pathlib import Path

import pytest
import torch
import triton

from graphkit.ops.kv_cache import store_kv
from graphkit.ops.paged_attention import paged_attention
from graphkit.ops.registration import OPS

assert os.environ.get("TRITON_INTERPRET") == "1", "run ops/test_interpreted.py instead"

CASES = runpy.run_path(str(Path(__file__).with_name("fp8_cases.py")))
every_scale = pytest.mark.parametrize("kind", CASES["SCALES"])


def launch(op, *args, **options):
    op = OPS[op.__name__]
    return op.launch(op.arguments(*args), **options)


@every_scale
def test_store(kind):
    key, value, loc = CASES["rows"]()
    scale = CASES["SCALES"][kind](3)
    # The interpreter does not round as hardware does: give it numbers that fit, or are too large.
    factor = 1.0 if scale is None else scale[:, None]
    key[1:], value = (rows.to(torch.float8_e4m3fn).float() * factor for rows in (key[1:], value))
    key[0] = 1e4
    one, other = CASES["caches"](), CASES["caches"]()
    launch(store_kv, *one, loc, key, value, scale, scale)
    store_kv(*other, loc, key, value, scale, scale)
    for got, expected in zip(one, other, strict=True):
        assert torch.equal(got.float(), expected.float())


@pytest.mark.skipif(
    triton.__version__ < "3.7", reason="triton 3.6 with numpy 2.4 cannot interpret such a loop"
)
@every_scale
@pytest.mark.parametrize("options", [{}, {"tree": True}, {"window": 3}], ids=str)
def test_attention(kind, options):
    args = CASES["attention_args"](kind, **options)
    for splits in (1, 2):
        got = launch(paged_attention, *args, splits=splits)
        torch.testing.assert_close(got, paged_attention(*args), rtol=1e-5, atol=1e-5)
