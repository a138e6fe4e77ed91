"""Keys and values in float8_e4m3fn on CUDA against their references on the CPU."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

import graphkit as gk
from graphkit.models.reference import reference_engine
from graphkit.ops.kernels.attention_config import LARGE_KEYS, AttentionConfig
from graphkit.ops.kernels.devices import has_float8_cvt
from graphkit.ops.kernels.float8 import float8_pairs
from graphkit.ops.kv_cache import store_kv
from graphkit.ops.paged_attention import paged_attention
from graphkit.ops.registration import OPS

pytestmark = pytest.mark.gpu
FILE = Path(__file__).parents[1] / "unit" / "attention" / "fp8_cases.py"
BENCH = Path(__file__).parents[2] / "tools" / "bench" / "accept_lengths.py"
CASES = runpy.run_path(str(FILE))
FP8 = torch.float8_e4m3fn
every_scale = pytest.mark.parametrize("kind", CASES["SCALES"])


def on_cpu(args):
    return [each.cpu() if isinstance(each, torch.Tensor) else each for each in args]


@every_scale
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_stored_bytes_are_those_of_the_reference(kind, dtype):
    key, value, loc = CASES["rows"](dtype=dtype, device="cuda")
    scale = CASES["SCALES"][kind](3)
    scales = [None if scale is None else scale.cuda()] * 2
    caches = CASES["caches"](device="cuda")
    store_kv(*caches, loc, key, value, *scales)
    expected = CASES["caches"]()
    store_kv(*expected, *on_cpu((loc, key, value, *scales)))
    for one, other in zip(caches, expected, strict=True):
        assert torch.equal(one.cpu().view(torch.uint8), other.view(torch.uint8))


@every_scale
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", [{}, {"tree": True}, {"window": 3}], ids=str)
def test_attention_matches_the_reference(kind, dtype, options):
    args = CASES["attention_args"](kind, dtype=dtype, device="cuda", **options)
    expected = paged_attention(*on_cpu(args))
    tolerance = 8 * torch.finfo(dtype).eps if dtype != torch.float32 else 1e-4
    torch.testing.assert_close(
        paged_attention(*args).cpu(), expected, rtol=tolerance, atol=tolerance
    )


@triton.jit
def convert(lower, upper, words, HAS_CVT: tl.constexpr):
    """Convert the two numbers of 1024 words."""
    at = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    one, other = float8_pairs(tl.load(words + at), HAS_CVT)
    tl.store(lower + at, one)
    tl.store(upper + at, other)


@pytest.mark.parametrize("has_cvt", [False, True], ids=["integers", "cvt"])
def test_every_number_converts_exactly(has_cvt):
    if has_cvt and not has_float8_cvt(torch.device("cuda")):
        pytest.skip("needs compute capability 8.9")
    words = torch.arange(65536).int().to(torch.int16)
    halves = torch.empty(2, 65536, dtype=torch.float16, device="cuda")
    convert[64,](*halves, words.cuda(), has_cvt)
    expected = words.view(FP8).view(-1, 2).T.float()
    is_number = ~expected.isnan()
    assert is_number.sum() == 2 * 256 * 254
    halves = halves.cpu()
    assert torch.equal(halves.float()[is_number], expected[is_number])
    if has_cvt:
        assert halves.isnan().equal(~is_number)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("width", [1, 4, 16])
@pytest.mark.parametrize(
    ("head_dim", "exponent"), [(10, 0), (16, 0), (64, -30), (80, 0), (128, 30), (256, 0)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_all_numbers_head_sizes_and_widths(dtype, head_dim, exponent, width, tree, page_size):
    """Queries have a factor of 2**exponent, which float16 does not have."""
    if dtype == torch.float16:
        exponent = 0
    args = CASES["wide_args"](
        dtype, head_dim=head_dim, width=width, tree=tree, exponent=exponent,
        page_size=page_size, device="cuda",
    )  # fmt: skip
    expected = paged_attention(*on_cpu(args))
    # Weights of values up to 448 are rounded to 11 bits.
    rtol, atol = (1e-4, 1e-3) if dtype == torch.float32 else (4 * torch.finfo(dtype).eps, 0.2)
    torch.testing.assert_close(paged_attention(*args).cpu(), expected, rtol=rtol, atol=atol)


@pytest.mark.sanitized
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("block_rows", [16, 32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_large_blocks_of_keys(dtype, block_rows, tree, splits):
    """By default the 32 rows of so few requests run in blocks of 16."""
    args = CASES["wide_args"](dtype, head_dim=128, width=8, tree=tree, exponent=0, device="cuda")
    op = OPS["paged_attention"]
    config = AttentionConfig(block_rows, LARGE_KEYS)
    got = op.launch(op.arguments(*args), splits=splits, config=config)
    rtol = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(got.cpu(), paged_attention(*on_cpu(args)), rtol=rtol, atol=0.2)


def test_nan_that_no_query_sees_does_not_reach_the_output():
    args = CASES["wide_args"](
        torch.bfloat16, head_dim=128, width=4, tree=True, exponent=0, device="cuda"
    )
    expected = paged_attention(*on_cpu(args))
    for cache in args[1:3]:
        cache.view(torch.uint8)[:16] = 0x7F  # no request has page 0
    # The second request ends within its last page.
    last = int(args[3][1, 70 // 16]) * 16
    for cache in args[1:3]:
        cache.view(torch.uint8)[last + 70 % 16 : last + 16] = 0x7F
    torch.testing.assert_close(paged_attention(*args).cpu(), expected, rtol=4e-2, atol=0.2)


@pytest.mark.parametrize("algorithm", ["EAGLE", "EAGLE3"])
def test_accept_lengths_are_those_of_bfloat16(algorithm):
    """The texts differ, so that the lengths of one prompt differ by 0.3 tokens (one deviation).

    The mean over 64 prompts then deviates by 0.04 of 3.4 tokens, and 5 % are four deviations.
    """
    prompts = runpy.run_path(str(BENCH))["held_out_prompts"](64)
    lengths = []
    for kv_dtype in (None, FP8):
        with reference_engine(
            algorithm, dtype=torch.bfloat16, kv_dtype=kv_dtype, max_batch_size=8, device="cuda"
        ) as engine:
            engine.capture()
            engine.generate(prompts, gk.SamplingParams(max_new_tokens=64))
            lengths.append(engine.stats.accept_length)
            assert all(not runner.stats.fallbacks for runner in engine.runners)
    assert lengths[1] > 0.95 * lengths[0], lengths
