"""``attention_conformance``: the backends of this package pass, and broken ones are named."""

from __future__ import annotations

import pytest
import torch

from graphkit.attention import SdpaAttention, TritonAttention
from graphkit.errors import ConfigError
from graphkit.kv import MHATokenToKVPool
from graphkit.spec import ForwardMode
from graphkit.testing import attention_conformance

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("backend", [SdpaAttention, TritonAttention])
@pytest.mark.parametrize("device", DEVICES)
def test_the_backends_of_this_package_pass(backend, device):
    passed = attention_conformance(backend, device=device)
    assert len(passed) == len(set(passed)) == 2 * 2 * 14 + 1
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
    class Baked(Narrow):
        """Its metadata is that of the first batch."""

        kept = None

        def metadata(self, mode, inputs):
            self.kept = self.kept or super().metadata(mode, inputs)
            return self.kept

    _, *lines = failures(Baked)
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


@pytest.mark.parametrize(
    ("field", "value"), [("options", ("alibi",)), ("dtype", torch.int8), ("pools", (int,))]
)
def test_unknown_settings_are_refused(field, value):
    with pytest.raises(ConfigError, match=f"attention_conformance: {field} must be"):
        run(Narrow, **{field: value})
