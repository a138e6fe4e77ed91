"""Keys and values in float8_e4m3fn: ops, pools, backends and moves."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch

import graphkit as gk
from graphkit import AttentionError, ConfigError
from graphkit.engine.attention import SdpaAttention, TritonAttention
from graphkit.engine.kv import MHATokenToKVPool, MLATokenToKVPool, ReqToTokenPool
from graphkit.models.byte_tokenizer import ByteTokenizer
from graphkit.models.reference import reference_engine
from graphkit.ops.kv_cache import store_kv
from graphkit.ops.paged_attention import paged_attention
from graphkit.ops.registration import OPS

CASES = runpy.run_path(str(Path(__file__).with_name("fp8_cases.py")))
FP8 = torch.float8_e4m3fn
every_scale = pytest.mark.parametrize("kind", CASES["SCALES"])


@every_scale
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_divided_by_their_scale(kind, dtype):
    key, value, loc = CASES["rows"](dtype=dtype)
    scale = CASES["SCALES"][kind](3)
    caches = CASES["caches"]()
    store_kv(*caches, loc, key, value, scale, scale)
    factor = torch.ones(3) if scale is None else scale
    for cache, rows in zip(caches, (key, value), strict=True):
        for token, slot in enumerate(loc.tolist()):
            for head in range(3):
                expected = (rows[token, head].float() / factor[head]).clamp(-448, 448).to(FP8)
                assert torch.equal(cache[slot, head].float(), expected.float())
    assert caches[0].float().max() == 448
    untouched = sorted(set(range(12)) - set(loc.tolist()))
    assert not caches[0].float()[untouched].any()


@every_scale
@pytest.mark.parametrize("options", [{}, {"tree": True}, {"window": 3}], ids=str)
def test_attention_is_that_over_dequantised_caches(kind, options):
    args = CASES["attention_args"](kind, **options)
    expected = paged_attention(*CASES["dequantised"](args))
    torch.testing.assert_close(paged_attention(*args), expected)
    pool = MHATokenToKVPool(23, 1, FP8, 2, 32, 1, "cpu")
    requests = ReqToTokenPool(2, 16, "cpu")
    backend = SdpaAttention(requests, pool)
    got = backend._attend(OPS["paged_attention"].arguments(*args))
    torch.testing.assert_close(got, expected)


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


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["EAGLE", "EAGLE3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_trained_drafts_are_accepted_as_often(algorithm, dtype):
    """Accept lengths with FP8 keys and values; the text is the target's own over the same pool."""
    texts = (
        "def replay(self, batch):", "import torch\n", "class Runner:\n    def __init__(self",
        "for index in range(", "    if self.is_open:\n        return", "    raise ConfigError(f",
    )  # fmt: skip
    prompts = [ByteTokenizer().encode(text) for text in texts]
    params = gk.SamplingParams(max_new_tokens=64)
    sizes = {"max_batch_size": len(prompts), "max_context_len": 160, "device": "cpu"}
    found = {}
    for kv_dtype in (None, FP8):
        with reference_engine(algorithm, dtype=dtype, kv_dtype=kv_dtype, **sizes) as engine:
            engine.capture()
            texts = [each.output_ids for each in engine.generate(prompts, params)]
            found[kv_dtype] = texts, engine.stats.accept_length
    (texts, length), (fp8_texts, fp8_length) = found.values()
    assert fp8_length > 0.9 * length
    begins = [one[:8] == other[:8] for one, other in zip(texts, fp8_texts, strict=True)]
    assert sum(begins) >= 4
    if dtype == torch.float32:
        with reference_engine("NONE", dtype=dtype, kv_dtype=FP8, **sizes) as engine:
            engine.capture()
            own = engine.generate(prompts, params)
        assert [each.output_ids for each in own] == fp8_texts
