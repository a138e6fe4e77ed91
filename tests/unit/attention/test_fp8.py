"""Keys and values in float8_e4m3fn: ops on every device, pools, backends and moves."""

from __future__ import annotations

from itertools import product

import pytest
import torch
import triton
import triton.language as tl

from graphkit import AttentionError, ConfigError
from graphkit.engine.attention import SdpaAttention, TritonAttention
from graphkit.engine.kv import MHATokenToKVPool, MLATokenToKVPool, ReqToTokenPool
from graphkit.ops.kernels.attention_config import LARGE_KEYS, AttentionConfig
from graphkit.ops.kernels.devices import has_float8_cvt
from graphkit.ops.kernels.float8 import float8_pairs
from graphkit.ops.kv_cache import store_kv
from graphkit.ops.paged_attention import paged_attention
from graphkit.ops.registration import OPS
from op_devices import CPU, CUDA, INTERPRETER, LOOPS, by

FP8 = torch.float8_e4m3fn
SCALES = {
    "none": lambda _: None,
    "tensor": lambda heads: torch.full((heads,), 0.5),
    "heads": lambda heads: 2.0 ** torch.arange(-2, heads - 2),
}
every_scale = pytest.mark.parametrize("kind", SCALES)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
every_dtype = pytest.mark.parametrize("dtype", DTYPES)
either_tree = pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])


def attention_args(kind, *, dtype=torch.float32, tree=False, window=0):
    """Return arguments of ``paged_attention`` over caches of float8_e4m3fn.

    Two requests of 9 and 3 keys have two query rows each, with two query heads per key head.
    """
    generator = torch.Generator().manual_seed(1)
    heads, head_dim, slots = 2, 32, 24
    scale = SCALES[kind](heads)
    scales = [None if scale is None else scale + shift for shift in (0, 0.5)]
    stored = [torch.randn(slots, heads, head_dim, generator=generator).to(FP8) for _ in "kv"]
    query = torch.randn(4, 2 * heads, head_dim, generator=generator).to(dtype)
    table = torch.stack([torch.arange(1, 11), torch.arange(11, 21)]).int()
    mask = torch.tensor([[[True, False], [False, True]]] * 2) if tree else None
    lengths = torch.tensor([9, 3], dtype=torch.int32)
    sums = torch.tensor([0, 2, 4], dtype=torch.int32)
    numbers = head_dim**-0.5, 1, 2, window, 0.0
    return query, *stored, table, lengths, sums, mask, *numbers, None, *scales


def wide_args(dtype, *, head_dim, width, tree, exponent, page_size=16):
    """Return arguments of ``paged_attention`` with all 254 numbers in both caches.

    Three requests of 300, 70 and 16 keys, with four query heads per key head. The queries have a
    factor of 2**exponent, which the scale of the scores divides out.
    """
    generator = torch.Generator().manual_seed(head_dim + width)
    lengths, heads = (300, 70, 16), 2
    pages = [-(-length // page_size) for length in lengths]
    slots = (sum(pages) + 1) * page_size
    stored = []
    for spread in (16.0, 1.0):  # large keys would leave one key per row
        codes = torch.randint(0, 254, (slots, heads, head_dim), generator=generator)
        codes += (codes >= 0x7F).int()  # NaN is 0x7F and 0xFF
        cache = codes.to(torch.uint8).view(FP8).float() / spread
        stored.append(cache.to(FP8))
    stored[1].view(torch.uint8)[:, :, ::2] ^= 0x80
    query = torch.randn(3 * width, 4 * heads, head_dim, generator=generator).to(dtype)
    table = torch.zeros(3, max(pages), dtype=torch.int32)
    order = (torch.randperm(sum(pages), generator=generator) + 1).int().split(pages)
    for request, own in enumerate(order):
        table[request, : len(own)] = own
    mask = torch.eye(width, dtype=torch.bool).repeat(3, 1, 1) if tree else None
    ints = [table, torch.tensor(lengths).int(), (torch.arange(4) * width).int(), mask]
    scale = head_dim**-0.5 / 16 * 2.0**-exponent
    return query * 2.0**exponent, *stored, *ints, scale, page_size, width


@by(CPU, INTERPRETER, CUDA)
@every_scale
@every_dtype
def test_rows_are_divided_by_their_scale(run, kind, dtype):
    generator = torch.Generator().manual_seed(0)
    key, value = ((4 * torch.randn(5, 3, 40, generator=generator)).to(dtype) for _ in "kv")
    loc, scale = torch.arange(5) * 3 % 11 + 1, SCALES[kind](3)
    factor = torch.ones(3, 1) if scale is None else scale[:, None]
    if run is INTERPRETER:  # it does not round as hardware does: give it numbers that fit
        key, value = ((rows.to(FP8).float() * factor).to(dtype) for rows in (key, value))
    key[0, 0, 0] = 1e4  # ends at the largest number
    caches = [torch.zeros(12, 3, 40).to(FP8) for _ in "kv"]
    run(store_kv, *caches, loc, key, value, scale, scale)
    for cache, rows in zip(caches, (key, value), strict=True):
        expected = (rows.float() / factor).clamp(-448, 448).to(FP8)
        assert torch.equal(cache.view(torch.uint8)[loc], expected.view(torch.uint8))
    assert caches[0].float().max() == 448
    untouched = sorted(set(range(12)) - set(loc.tolist()))
    assert not caches[0].float()[untouched].any()


@every_scale
@pytest.mark.parametrize("options", [{}, {"tree": True}, {"window": 3}], ids=str)
def test_attention_is_that_over_dequantised_caches(kind, options):
    args = attention_args(kind, **options)
    query, key, value, *rest, key_scale, value_scale = args
    wide = [
        cache.float() * (1.0 if scale is None else scale[:, None])
        for cache, scale in ((key, key_scale), (value, value_scale))
    ]
    expected = paged_attention(query, *wide, *rest, None, None)
    torch.testing.assert_close(paged_attention(*args), expected)
    pool = MHATokenToKVPool(23, 1, FP8, 2, 32, 1, "cpu")
    requests = ReqToTokenPool(2, 16, "cpu")
    backend = SdpaAttention(requests, pool)
    got = backend._attend(OPS["paged_attention"].arguments(*args))
    torch.testing.assert_close(got, expected)


@by(INTERPRETER, CUDA, interpreted=[LOOPS])
@every_scale
@pytest.mark.parametrize("options", [{}, {"tree": True}, {"window": 3}], ids=str)
@every_dtype
def test_attention_is_that_of_the_reference(run, kind, options, dtype):
    args = attention_args(kind, dtype=dtype, **options)
    tolerance = 1e-4 if dtype == torch.float32 else 8 * torch.finfo(dtype).eps
    if run is INTERPRETER:
        tolerance = 1e-5 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
    expected = paged_attention(*args)
    for splits, follows_store in ((None, False), (1, False), (2, False), (2, True)):
        launch = {"splits": splits} if splits else None
        got = run(paged_attention, *args, follows_store=follows_store, launch=launch)
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


@by(INTERPRETER, interpreted=[LOOPS])
def test_values_that_are_their_keys(run):
    query, keys, _, *others = attention_args("none", dtype=torch.float16)
    args = query, keys, keys, *others
    got = run(paged_attention, *args, launch={"splits": 1})
    torch.testing.assert_close(got, paged_attention(*args), rtol=4e-3, atol=4e-3)


@triton.jit
def convert(lower, upper, words, HAS_CVT: tl.constexpr):
    """Convert the two numbers of 1024 words."""
    at = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    one, other = float8_pairs(tl.load(words + at), HAS_CVT)
    tl.store(lower + at, one)
    tl.store(upper + at, other)


@by(INTERPRETER, CUDA)
@pytest.mark.parametrize("has_cvt", [False, True], ids=["integers", "cvt"])
def test_every_number_converts_exactly(run, has_cvt):
    if has_cvt and (run is INTERPRETER or not has_float8_cvt(torch.device("cuda"))):
        pytest.skip("needs compute capability 8.9")
    words = torch.arange(65536).int().to(torch.int16)
    halves = torch.empty(2, 65536, dtype=torch.float16, device=run.torch_device)
    convert[64,](*halves, words.to(halves.device), has_cvt)
    halves = halves.cpu()
    expected = words.view(FP8).view(-1, 2).T.float()
    is_number = ~expected.isnan()
    assert is_number.sum() == 2 * 256 * 254
    assert torch.equal(halves.float()[is_number], expected[is_number])
    assert has_cvt or torch.equal(halves.signbit(), expected.signbit())
    assert not has_cvt or halves.isnan().equal(~is_number)


def wide_cases():
    """Yield a run, a dtype, a head size, an exponent of the queries, rows, and a page size."""
    for dtype, width, page_size in product(DTYPES, (1, 4, 16), (1, 16)):
        for head_dim, exponent in ((10, 0), (16, 0), (64, -30), (80, 0), (128, 30), (256, 0)):
            # float16 has neither 2**-30 nor 2**30.
            exponent = 0 if dtype == torch.float16 else exponent
            yield pytest.param(
                CUDA, dtype, head_dim, exponent, width, page_size, marks=pytest.mark.gpu
            )
    for head_dim, exponent in ((32, -30), (80, 0), (10, 30)):
        yield pytest.param(
            INTERPRETER,
            torch.bfloat16,
            head_dim,
            exponent,
            4,
            16,
            marks=[pytest.mark.interpreted, LOOPS],
        )


@either_tree
@pytest.mark.parametrize(
    ("run", "dtype", "head_dim", "exponent", "width", "page_size"), list(wide_cases()), ids=str
)
def test_all_numbers_head_sizes_and_widths(run, dtype, head_dim, exponent, width, page_size, tree):
    args = wide_args(
        dtype, head_dim=head_dim, width=width, tree=tree, exponent=exponent, page_size=page_size
    )
    expected = paged_attention(*args)
    # Weights of values up to 448 are rounded to 11 bits.
    rtol, atol = (1e-4, 1e-3) if dtype == torch.float32 else (4 * torch.finfo(dtype).eps, 0.2)
    for launch in (None,) if run is CUDA else ({"splits": 1}, {"splits": 3}):
        got = run(paged_attention, *args, launch=launch)
        torch.testing.assert_close(got, expected, rtol=rtol, atol=atol)


@pytest.mark.sanitized
@by(INTERPRETER, CUDA, interpreted=[LOOPS])
@either_tree
@pytest.mark.parametrize("block_rows", [16, 32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_large_blocks_of_keys(run, dtype, block_rows, tree):
    """By default the 32 rows of so few requests run in blocks of 16."""
    head_dim = 128 if run is CUDA else 32
    args = wide_args(dtype, head_dim=head_dim, width=8, tree=tree, exponent=0)
    expected, config = paged_attention(*args), AttentionConfig(block_rows, LARGE_KEYS)
    for splits in (1, 3):
        got = run(paged_attention, *args, launch={"splits": splits, "config": config})
        rtol = 4 * torch.finfo(dtype).eps
        torch.testing.assert_close(got, expected, rtol=rtol, atol=0.2)


@by(CUDA)
def test_nan_that_no_query_sees_does_not_reach_the_output(run):
    args = wide_args(torch.bfloat16, head_dim=128, width=4, tree=True, exponent=0)
    expected = paged_attention(*args)
    # No request has page 0, and the second one ends within its last page.
    last = int(args[3][1, 70 // 16]) * 16
    for cache in args[1:3]:
        cache.view(torch.uint8)[:16] = 0x7F
        cache.view(torch.uint8)[last + 70 % 16 : last + 16] = 0x7F
    torch.testing.assert_close(run(paged_attention, *args), expected, rtol=4e-2, atol=0.2)


@pytest.mark.parametrize("backend", [SdpaAttention, TritonAttention])
@pytest.mark.parametrize(
    "scale", [None, 0.5, torch.tensor([0.5, 2.0]), torch.tensor([[1.0, 2.0], [0.25, 0.5]])], ids=str
)
def test_a_pool_stores_and_attends_with_its_scales(backend, scale):
    """A backend over a pool of FP8 attends to the rounded keys and values."""
    pool = MHATokenToKVPool(8, 1, FP8, 2, 16, 2, "cpu", key_scale=scale, value_scale=scale)
    plain = MHATokenToKVPool(8, 1, torch.float32, 2, 16, 2, "cpu")
    requests = ReqToTokenPool(1, 8, "cpu")
    requests.req_to_token[1] = torch.arange(1, 9)
    generator = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 4, 2, 16, generator=generator)
    loc = torch.arange(1, 5)
    factor = torch.ones(2, 2) if scale is None else torch.as_tensor(scale).expand(2, 2)
    for layer in range(2):
        spread = factor[layer][:, None]
        rounded = [((rows / spread).to(FP8).float() * spread) for rows in (key, value)]
        pool.set_kv_buffer(layer, loc, key, value)
        plain.set_kv_buffer(layer, loc, *rounded)
        args = [
            query, None, None, torch.arange(1, 9, dtype=torch.int32)[None],
            torch.tensor([4], dtype=torch.int32), torch.tensor([0, 4], dtype=torch.int32), None,
            0.25, 1, 4, 0, 0.0, None,
        ]  # fmt: skip
        outs = []
        for each in (pool, plain):
            args[1:3] = each.get_key_buffer(layer), each.get_value_buffer(layer)
            named = OPS["paged_attention"].arguments(*args, *each.get_scales(layer))
            outs.append(backend(requests, each)._attend(named))
        torch.testing.assert_close(*outs)


def test_moves_copy_the_bytes():
    pool = MHATokenToKVPool(8, 1, FP8, 2, 16, 2, "cpu")
    key, value = torch.randn(2, 3, 2, 16)
    for layer in range(2):
        pool.set_kv_buffer(layer, torch.tensor([1, 2, 3]), key, value)
    pool.move_kv_cache(torch.tensor([2, 5]), torch.tensor([1, 2]))
    for layer in range(2):
        keys = pool.get_key_buffer(layer).float()
        assert torch.equal(keys[[2, 5]], key[[0, 1]].to(FP8).float())
    assert {each.dtype for each in pool.tensors().values()} == {torch.uint8}
    assert pool.tensors()["key.0"].data_ptr() == pool.get_key_buffer(0).data_ptr()


def test_a_pool_has_half_the_bytes_of_bfloat16():
    def nbytes(dtype):
        pool = MHATokenToKVPool(8, 1, dtype, 2, 16, 2, "cpu")
        return sum(each.nbytes for each in pool.tensors().values())

    assert nbytes(FP8) * 2 == nbytes(torch.bfloat16)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"key_scale": torch.ones(3)}, r"key_scale has shape \[3\], expected a number, \[2\]"),
        ({"value_scale": 0.0}, "value_scale must be positive and finite"),
        ({"key_scale": float("nan")}, "key_scale must be positive and finite"),
        ({"key_scale": "1.0"}, "key_scale must be a number, a tensor or None, got '1.0'"),
        ({"value_scale": "a"}, "value_scale must be a number, a tensor or None, got 'a'"),
        ({"value_scale": [[1], [1, 2]]}, "value_scale must be a number, a tensor or None"),
        ({"key_scale": 10**400}, "key_scale must be a number, a tensor or None"),
        ({"dtype": torch.bfloat16, "key_scale": 1.0}, "key_scale is for a pool of float8_e4m3fn"),
        ({"dtype": torch.float8_e5m2}, "dtype must be float16, bfloat16, float32 or float8_e4m3fn"),
    ],
)
def test_refused_pools(options, text):
    options = {"dtype": FP8} | options
    with pytest.raises(ConfigError, match=text):
        MHATokenToKVPool(8, 1, options.pop("dtype"), 2, 16, 2, "cpu", **options)


def test_latents_are_not_stored_in_fp8():
    with pytest.raises(ConfigError, match="dtype must be float16, bfloat16 or float32"):
        MLATokenToKVPool(8, 1, FP8, 16, 8, 1, "cpu")


def test_scales_need_a_cache_of_fp8():
    caches = [torch.zeros(4, 2, 8) for _ in "kv"]
    with pytest.raises(AttentionError, match="scales are for a cache of float8_e4m3fn"):
        store_kv(*caches, torch.tensor([1]), *torch.ones(2, 1, 2, 8), torch.ones(2))
