"""``attend_projected`` gives the results of ``attend`` over heads that are rotated before."""

from __future__ import annotations

import pytest
import torch

from graphkit.engine.attention import ProjectedHeads, SdpaAttention, TritonAttention
from graphkit.engine.attention.cache import PagedCache
from graphkit.engine.kv import MHATokenToKVPool, MLATokenToKVPool
from graphkit.errors import AttentionError
from graphkit.ops.kv_cache import FP8


def projected(rows, heads, key_heads, size):
    """Return random heads with norms, in two parts."""
    generator = torch.Generator().manual_seed(5)
    qkv = torch.randn(2, rows, (heads + 2 * key_heads) * size, generator=generator)
    weights = torch.randn(2, size, generator=generator)
    frequencies = 1.0 / 100 ** (torch.arange(0, size, 2) / size)
    return ProjectedHeads(
        qkv, torch.arange(rows) * 7, frequencies, heads, key_heads, *weights, 1e-6, torch.float32
    )


def heads_of(case):
    return projected(*case.query.shape[:2], *case.key.shape[1:])


def assert_equal_outcomes(backend, case):
    """Compare results and pools after both ways to attend, from the same state of the pools."""
    heads, slots = heads_of(case), case.out_cache_loc
    pools = [pool for pool in (backend.kv_pool, backend.window_kv_pool) if pool is not None]
    memory = [tensor.view(torch.uint8) for pool in pools for tensor in pool.tensors().values()]
    before = [each.clone() for each in memory]
    metadata = backend.metadata(case.mode, case.inputs)
    expected = backend.attend(1, *heads.rotated(), slots, metadata, **case.options)
    after = [each.clone() for each in memory]
    for each, old in zip(memory, before, strict=True):
        each.copy_(old)
    got = backend.attend_projected(1, heads, slots, metadata, **case.options)
    assert torch.equal(got[: case.live_rows], expected[: case.live_rows])
    assert all(map(torch.equal, memory, after))
    assert not all(map(torch.equal, before, after))


@pytest.mark.parametrize("name", ["qkv", "query_weight", "key_weight"])
def test_gradients_are_those_of_attend(make_case, name):
    case = make_case([9, 20], width=3, page_size=4)
    backend, slots = case.backend(SdpaAttention), case.out_cache_loc
    metadata = backend.metadata(case.mode, case.inputs)
    gradients = []
    for is_projected in (True, False):
        heads = heads_of(case)
        tensor = getattr(heads, name).requires_grad_()
        if is_projected:
            out = backend.attend_projected(1, heads, slots, metadata)
        else:
            out = backend.attend(1, *heads.rotated(), slots, metadata)
        out.sum().backward()
        gradients.append(tensor.grad)
    assert torch.equal(*gradients)
    # The pool keeps no gradient of keys and values.
    assert gradients[0].any() == (name != "key_weight")


@pytest.mark.parametrize(
    "options",
    [
        {}, {"tree": True}, {"window": 5}, {"window": 4, "chunked": True},
        {"softcap": 2.0, "sinks": True}, {"head_dim": 80}, {"head_dim": 96, "heads": 6},
    ],
    ids=str,
)  # fmt: skip
def test_results_are_those_of_attend(make_case, backend_type, options):
    case = make_case([9, 20], width=3, page_size=4, pads=1, **options)
    assert_equal_outcomes(case.backend(backend_type), case)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, FP8])
def test_pools_of_other_dtypes(make_case, backend_type, dtype):
    case = make_case([9, 20], width=3)
    pool, (_, keys, size) = case.pool, case.key.shape
    scales = {}
    if dtype == FP8:
        scales = {"key_scale": 0.1, "value_scale": torch.linspace(0.2, 0.7, keys)}
    pool = MHATokenToKVPool(pool.size, pool.page_size, dtype, keys, size, 2, "cpu", **scales)
    assert_equal_outcomes(backend_type(case.requests, pool), case)


def test_layers_with_a_window_may_have_a_pool_of_their_own(make_case, backend_type):
    full = make_case([9, 20], width=3, page_size=4)
    split = make_case([9, 20], width=3, window=5)
    backend = backend_type(
        full.requests, full.pool, window_req_to_token_pool=split.requests,
        window_kv_pool=split.pool,
    )  # fmt: skip
    for case in (full, split):
        assert_equal_outcomes(backend, case)


def test_an_own_attend_of_a_subclass_is_called(make_case):
    calls = []

    class Counting(TritonAttention):
        def attend(self, layer, *args, **options):
            calls.append(layer)
            return super().attend(layer, *args, **options)

    case = make_case([9, 20], width=3, window=5)
    assert_equal_outcomes(case.backend(Counting), case)
    assert calls == [1, 1]


def test_own_stores_of_a_backend_and_of_a_pool_are_called(make_case):
    calls = []

    class Backend(TritonAttention):
        def store(self, layer, *args, **options):
            calls.append("store")
            super().store(layer, *args, **options)

    class Pool(MHATokenToKVPool):
        def set_kv_buffer(self, layer, *args):
            calls.append("set_kv_buffer")
            super().set_kv_buffer(layer, *args)

    case = make_case([9, 20], width=3)
    assert_equal_outcomes(case.backend(Backend), case)
    assert calls == ["store"] * 2
    pool, (_, keys, size) = case.pool, case.key.shape
    own = Pool(pool.size, pool.page_size, torch.float32, keys, size, 2, "cpu")
    assert_equal_outcomes(TritonAttention(case.requests, own), case)
    assert calls == ["store"] * 2 + ["set_kv_buffer"] * 2


class Observed(TritonAttention):
    """Keeps whether each call said that a store precedes it."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.follow_stores = []

    def _attend(self, args):
        self.follow_stores.append(args.follows_store)
        return super()._attend(args)


class StoresNothing(Observed):
    """Reads keys that something else stores."""

    def store(self, *args, **options):
        """Launch no kernel."""


class PoolStoresNothing(MHATokenToKVPool):
    """As ``StoresNothing``."""

    def set_kv_buffer(self, *args):
        """Launch no kernel."""


def test_attention_follows_a_store_unless_a_subclass_may_store_nothing(make_case):
    case = make_case([9, 20], width=3)
    heads, pool = heads_of(case), case.pool
    own = PoolStoresNothing(pool.size, pool.page_size, torch.float32, *case.key.shape[1:], 2, "cpu")
    for kind, kv_pool, want in (
        (Observed, pool, True), (StoresNothing, pool, False), (Observed, own, False),
    ):  # fmt: skip
        backend = kind(case.requests, kv_pool)
        metadata = backend.metadata(case.mode, case.inputs)
        backend.attend(1, *heads.rotated(), case.out_cache_loc, metadata)
        backend.attend_projected(1, heads, case.out_cache_loc, metadata)
        assert backend.follow_stores == [want, want]


def test_a_pool_of_latents_stores_the_rotated_heads():
    pool, other = (MLATokenToKVPool(8, 1, torch.float32, 16, 16, 2, "cpu") for _ in "ab")
    heads, slots = projected(3, 2, 1, 16), torch.tensor([4, 8, 2])
    query, key, value = heads.rotated()
    assert torch.equal(PagedCache(None, pool).store_rotated(1, slots, heads), query)
    other.set_mla_kv_buffer(1, slots, key, value)
    assert torch.equal(pool.get_key_buffer(1), other.get_key_buffer(1))


def test_one_op_rotates_and_stores(make_case, called_ops):
    case = make_case([6, 2], width=2, tree=True)
    backend, heads = case.backend(TritonAttention), heads_of(case)
    metadata = backend.metadata(case.mode, case.inputs)
    with called_ops:
        backend.attend_projected(1, heads, case.out_cache_loc, metadata)
    ours = ["store_rotated_heads", "paged_attention"]
    assert called_ops.names == [f"graphkit.{name}.default" for name in ours]


def test_heads_that_do_not_fit_are_refused(make_case):
    case = make_case([6], width=2)
    backend, heads = case.backend(TritonAttention), heads_of(case)
    metadata = backend.metadata(case.mode, case.inputs)
    with pytest.raises(AttentionError, match="no layer 2: it has 2"):
        backend.attend_projected(2, heads, case.out_cache_loc, metadata)
    rows, (_, keys, size) = len(case.query), case.key.shape
    wide = projected(rows, 2, keys, 2 * size)
    with pytest.raises(AttentionError, match=r"store_rotated_heads: key_cache is .* expected"):
        backend.attend_projected(1, wide, case.out_cache_loc, metadata)
