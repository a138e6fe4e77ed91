"""``attention_conformance``: the backends of this package pass, and broken ones are named."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from graphkit.engine.attention import SdpaAttention, TritonAttention
from graphkit.engine.kv import MHATokenToKVPool
from graphkit.errors import ConfigError
from graphkit.graphs import is_capturing
from graphkit.spec import ForwardMode
from graphkit.testing import attention_conformance
from own_attention import GatherAttention, StackedPool

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("backend", [SdpaAttention, TritonAttention])
@pytest.mark.parametrize("device", DEVICES)
def test_the_backends_of_this_package_pass(backend, device):
    passed = attention_conformance(backend, device=device)
    assert len(passed) == len(set(passed)) == 2 * 2 * 16 + 1
    assert "MLATokenToKVPool, page size 16, TARGET_VERIFY, tree, captured" in passed
    assert "MHATokenToKVPool, page size 1, DRAFT_EXTEND" in passed


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_kernel_passes_in_half_precision(dtype):
    sizes = {"heads": 16, "head_dim": 128, "latent_dims": (512, 64), "page_sizes": (1, 64)}
    attention_conformance(TritonAttention, dtype=dtype, device="cuda", **sizes)


class Narrow(SdpaAttention):
    """Reads no latents, and knows one mode and no options."""

    pool_types = (MHATokenToKVPool,)

    def supports(self, mode):
        return mode is ForwardMode.TARGET_VERIFY

    def attend(self, layer, query, key, value, loc, metadata):
        return super().attend(layer, query, key, value, loc, metadata)


def run(backend, **options):
    settings = {"device": "cpu", "page_sizes": (1,), "options": ()}
    return attention_conformance(backend, **settings | options)


def test_a_backend_is_tested_in_what_it_supports():
    where = "MHATokenToKVPool, page size 1, TARGET_VERIFY"
    assert run(Narrow) == [
        f"{where}, chain", f"{where}, chain, captured", f"{where}, tree",
        f"{where}, tree, captured", "refuses MLATokenToKVPool", "refuses ReqToTokenPool",
    ]  # fmt: skip


def failures(backend, **options):
    with pytest.raises(AssertionError) as caught:
        run(backend, **options)
    return str(caught.value).splitlines()


def test_an_option_that_it_does_not_take_fails_by_name():
    count, *lines = failures(Narrow, options=("window",))
    assert count == "2 of 8 tests of the backend failed."
    assert all("window: TypeError: " in line for line in lines)


def test_wrong_results_are_named():
    class Flat(Narrow):
        """Ignores the scores."""

        def __init__(self, requests, pool, scale):
            super().__init__(requests, pool, scale=0.0)

    _, *lines = failures(Flat)
    assert len(lines) == 4
    assert all("AssertionError: Tensor-likes are not close!" in line for line in lines)


def test_a_graph_that_keeps_the_lengths_of_its_capture_fails():
    class Frozen(Narrow):
        """Its metadata is that of the first batch."""

        kept = None

        def metadata(self, mode, inputs):
            self.kept = self.kept or super().metadata(mode, inputs)
            return self.kept

    _, *lines = failures(Frozen)
    assert [line.partition(": ")[0].rpartition(", ")[2] for line in lines] == ["captured"] * 2


def test_a_plan_is_made_before_each_replay():
    class Planned(Narrow):
        """Keeps its metadata in memory that ``before_replay`` writes."""

        kept = None

        def before_replay(self, mode, batch, padded_batch_size):
            assert padded_batch_size == batch.batch_size
            made = super().metadata(mode, batch)
            if self.kept is None:
                self.kept = made
            for name in ("cache_seqlens", "page_table", "cu_seqlens_q", "mask"):
                if getattr(made, name) is not None:
                    getattr(self.kept, name).copy_(getattr(made, name))

        def metadata(self, mode, inputs):
            return self.kept or super().metadata(mode, inputs)

    run(Planned)


def test_a_backend_that_accepts_any_pool_fails():
    class Careless(Narrow):
        def __init__(self, requests, pool, scale):
            if isinstance(pool, MHATokenToKVPool):
                super().__init__(requests, pool, scale=scale)

    _, *lines = failures(Careless)
    assert [line.partition(":")[0] for line in lines] == [
        "refuses MLATokenToKVPool",
        "refuses ReqToTokenPool",
    ]


def over_own_pools(kind=GatherAttention):
    """Return a function that makes a backend over a copy of the histories."""

    def make(req_to_token_pool, kv_pool, scale):
        layers = range(kv_pool.layer_num)
        pool = StackedPool(
            kv_pool.size, kv_pool.page_size, len(layers), kv_pool.head_num, kv_pool.head_dim, "cpu"
        )
        for layer in layers:
            pool.kv[:, layer, 0] = kv_pool.get_key_buffer(layer)
            pool.kv[:, layer, 1] = kv_pool.get_value_buffer(layer)
        return kind(req_to_token_pool, pool, scale)

    return make


def test_a_backend_over_own_pools_passes_in_every_mode():
    passed = run(over_own_pools(), page_sizes=(1, 4))
    assert len(passed) == 2 * 8
    assert "MHATokenToKVPool, page size 4, DRAFT_EXTEND" in passed


def test_a_function_may_attend():
    class Separate(GatherAttention):
        """Its kernel is a function of the model."""

        attend = None

    def attend(backend, *args):
        return GatherAttention.attend(backend, *args)

    assert run(over_own_pools(Separate), attend=attend)
    with pytest.raises(
        ConfigError, match=r"Separate has no method attend\. Pass attend="
    ) as caught:
        run(over_own_pools(Separate))
    assert caught.value.field == "attend"


def test_a_wrong_backend_over_own_pools_fails():
    class Causal(GatherAttention):
        """Ignores the mask of trees."""

        def metadata(self, mode, inputs):
            return super().metadata(mode, replace(inputs, custom_mask=None))

    _, *lines = failures(over_own_pools(Causal))
    assert len(lines) == 3
    assert all("tree" in line for line in lines)


def test_a_backend_is_prepared_and_pads_have_its_fill_value():
    class Prepared(GatherAttention):
        seq_len_fill_value = 3

        def metadata(self, mode, inputs):
            if not is_capturing():
                assert (inputs.seq_lens[inputs.req_pool_indices == 0] == 3).all()
            assert self.context_len == self.req_to_token_pool.max_context_len
            return super().metadata(mode, inputs)

    run(over_own_pools(Prepared))


@pytest.mark.parametrize("made", [None, object()])
def test_values_that_are_no_backend_are_refused(made):
    with pytest.raises(ConfigError, match=r"backend must be a callable that returns a graphkit\.A"):
        run(lambda *pools, scale: made)


@pytest.mark.parametrize(
    ("field", "value"), [("options", ("alibi",)), ("dtype", torch.int8), ("pools", (int,))]
)
def test_unknown_settings_are_refused(field, value):
    with pytest.raises(ConfigError, match=f"attention_conformance: {field} must be"):
        run(Narrow, **{field: value})
