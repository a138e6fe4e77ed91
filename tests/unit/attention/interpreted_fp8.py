"""Kernels over caches of float8_e4m3fn against their references. ``test_interpreted`` runs them."""

from __future__ import annotations

import os
import runpy
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

from graphkit.ops.kernels.attention_config import LARGE_KEYS, AttentionConfig
from graphkit.ops.kernels.float8 import float8_pairs
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
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_attention(kind, options, dtype):
    args = CASES["attention_args"](kind, dtype=dtype, **options)
    tolerance = 1e-5 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
    op, expected = OPS["paged_attention"], paged_attention(*args)
    for splits, follows_store in ((1, False), (2, False), (2, True)):
        got = op.launch(op.arguments(*args, follows_store=follows_store), splits=splits)
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.skipif(
    triton.__version__ < "3.7", reason="triton 3.6 with numpy 2.4 cannot interpret such a loop"
)
def test_values_that_are_their_keys():
    query, keys, _, *others = CASES["attention_args"]("none", dtype=torch.float16)
    args = query, keys, keys, *others
    got = launch(paged_attention, *args, splits=1)
    torch.testing.assert_close(got, paged_attention(*args), rtol=4e-3, atol=4e-3)


@triton.jit
def convert(lower, upper, words):
    """Convert the two numbers of 1024 words."""
    at = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    one, other = float8_pairs(tl.load(words + at), False)
    tl.store(lower + at, one)
    tl.store(upper + at, other)


def test_every_number_converts_exactly():
    codes = torch.arange(65536).int()
    words = codes.to(torch.int16)
    halves = torch.empty(2, 65536, dtype=torch.float16)
    convert[64,](*halves, words)
    expected = words.view(torch.float8_e4m3fn).view(-1, 2).T.float()
    is_number = ~expected.isnan()
    assert is_number.sum() == 2 * 256 * 254
    assert torch.equal(halves.float()[is_number], expected[is_number])
    assert torch.equal(halves.signbit(), expected.signbit())


@pytest.mark.skipif(
    triton.__version__ < "3.7", reason="triton 3.6 with numpy 2.4 cannot interpret such a loop"
)
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize(("head_dim", "exponent"), [(32, -30), (80, 0), (10, 30)])
def test_queries_of_any_size(head_dim, exponent, tree):
    """float16 has neither 2**-30 nor 2**30, the factors of the queries."""
    args = CASES["wide_args"](
        torch.bfloat16, head_dim=head_dim, width=4, tree=tree, exponent=exponent
    )
    for splits in (1, 3):
        got = launch(paged_attention, *args, splits=splits)
        torch.testing.assert_close(got, paged_attention(*args), rtol=2e-2, atol=0.1)


@pytest.mark.skipif(
    triton.__version__ < "3.7", reason="triton 3.6 with numpy 2.4 cannot interpret such a loop"
)
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("block_rows", [16, 32])
def test_large_blocks_of_keys(block_rows, tree):
    args = CASES["wide_args"](torch.bfloat16, head_dim=32, width=8, tree=tree, exponent=0)
    config = AttentionConfig(block_rows, LARGE_KEYS)
    for splits in (1, 3):
        got = launch(paged_attention, *args, splits=splits, config=config)
        torch.testing.assert_close(got, paged_attention(*args), rtol=2e-2, atol=0.1)
