"""A backend and pools that derive from no class of graphkit, in whole steps, audits and checks."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import graphkit as gk
from engine_runs import outputs, refuses
from graphkit.audit import audit_target
from graphkit.engine.kv import MHATokenToKVPool, ReqToTokenPool
from no_metadata import NoMetadata
from own_attention import BlockTable, GatherAttention, StackedPool

CASES = [
    ("EAGLE", 1, "v1", False),
    ("EAGLE", 2, "v2", True),
    ("EAGLE", 2, "v3", True),
    ("MULTI_LAYER_EAGLE", 2, "v3", True),
    ("NGRAM", 1, "v2", False),
    ("NONE", 1, "v3", True),
]


@pytest.mark.slow
@pytest.mark.parametrize(("algorithm", "topk", "generation", "captured"), CASES)
def test_steps_over_own_pools_are_lossless(
    make_engine, task, run_in_waves, algorithm, topk, generation, captured
):
    task = task.first(6)
    page_size = 4 if topk == 1 else 1
    engine = make_engine(
        algorithm, topk=topk, generation=generation, page_size=page_size, batch_sizes=[8],
        has_own_attention=True,
    )  # fmt: skip
    if captured:
        engine.capture()
    requests = run_in_waves(engine, task)
    assert outputs(requests) == task.expected


def attention(*, requests=None, pool=None):
    if requests is None:
        requests = ReqToTokenPool(2, 16, "cpu")
    if pool is None:
        pool = MHATokenToKVPool(32, 1, torch.float32, 1, 4, 1, "cpu")
    return GatherAttention(requests, pool)


def forward(inputs):
    return gk.ForwardOutput(next_token_logits=torch.zeros(inputs.num_tokens, 8))


def without(name, thing):
    """A copy of an object without a member."""
    members = {each: getattr(thing, each) for each in dir(thing) if not each.startswith("_")}
    del members[name]
    return SimpleNamespace(**members)


def pool_with(**members):
    pool = StackedPool(8, 2, 1, 1, 4, "cpu")
    for name, value in members.items():
        setattr(pool, name, value)
    return pool


KV = "EngineModel.attention.kv_pool"
TABLE = "EngineModel.attention.req_to_token_pool"
SHORT = torch.zeros(2, 10, 4)


@pytest.mark.parametrize(
    ("pool", "message"),
    [
        (torch.zeros(9, 2), rf"{KV} is a Tensor, whose size is a builtin_function_or_method: exp"),
        (
            without("size", pool_with()),
            rf"{KV} .* whose size is missing: expected an int >= 1, the",
        ),
        (without("page_size", pool_with()), "page_size is missing: expected .*its slots per page"),
        (
            without("tensors", pool_with()),
            r"tensors is missing: expected a method.*graphkit\.KVPool",
        ),
        (without("move_kv_cache", pool_with()), "move_kv_cache is missing: expected a method"),
        (pool_with(size=0), "whose size is 0"),
        (pool_with(page_size=1.0), "whose page_size is a float"),
        (
            pool_with(tensors=lambda: [SHORT]),
            r"whose tensors\(\) is a list: expected tensors by name",
        ),
        (pool_with(tensors=lambda: {"kv": 1}), r"tensors\(\)\['kv'\] is 1: expected a tensor"),
        (
            pool_with(tensors=lambda: {"kv": SHORT}),
            r"\['kv'\] has shape \(2, 10, 4\), expected at least size \+ page_size = 10 slots",
        ),
        (
            pool_with(tensors=lambda: {"kv": torch.zeros(10, 4, device="meta")}),
            r"\['kv'\] is on meta, but req_to_token_pool is on cpu",
        ),
        (
            pool_with(move_kv_cache=lambda loc: None),
            r"move_kv_cache.* is called with \(tgt_loc, src_",
        ),
    ],
)
def test_a_pool_that_is_no_kv_pool_is_refused_by_member(pool, message):
    with refuses(gk.ConfigError, "kv_pool", message):
        gk.EngineModel(forward, attention(pool=pool))


def table_with(**members):
    table = BlockTable(2, 16, "cpu")
    for name, value in members.items():
        setattr(table, name, value)
    return table


@pytest.mark.parametrize(
    ("requests", "message"),
    [
        (
            torch.zeros(3, 16).int(),
            rf"{TABLE} is a Tensor, whose size is a builtin_function_or_met",
        ),
        (
            without("max_context_len", table_with()),
            "max_context_len is missing: expected an int >= 1",
        ),
        (
            without("req_to_token", table_with()),
            r"req_to_token is missing: .*\[3, 16\] int32 or int64",
        ),
        (table_with(req_to_token=torch.zeros(3, 16)), r"req_to_token is \(3, 16\) torch.float32"),
        (
            table_with(req_to_token=torch.zeros(2, 16).int()),
            r"req_to_token is \(2, 16\) torch.int32",
        ),
    ],
)
def test_a_table_that_is_no_request_table_is_refused_by_member(requests, message):
    with refuses(gk.ConfigError, "req_to_token_pool", message):
        gk.EngineModel(forward, attention(requests=requests))


@pytest.mark.parametrize(
    ("value", "message", "field"),
    [
        (
            None,
            r"EngineModel\.attention is a NoneType, expected a graphkit.AttentionBackend",
            "attention",
        ),
        (object(), "EngineModel.attention is a object", "attention"),
        (
            NoMetadata(),
            "is a NoMetadata without req_to_token_pool.*graphkit.PooledAttention",
            "req_to_token_pool",
        ),
    ],
    ids=["None", "object", "no pools"],
)
def test_a_backend_without_pools_is_refused(value, message, field):
    with refuses(gk.ConfigError, field, message):
        gk.EngineModel(forward, value)


SPEC, SIZES = gk.SpecConfig("NGRAM", 2, 1, 3), gk.BufferSizes(2, 16, 4, 8, torch.float32)


@pytest.mark.parametrize("name", ["available", "device", "alloc", "free"])
def test_an_engine_needs_a_pool_that_allocates_and_a_step_a_table(name):
    model = gk.EngineModel(forward, attention(requests=without(name, table_with())))
    options = {"spec": SPEC, "sizes": SIZES, "device": "cpu", "batch_sizes": [2]}
    with pytest.raises(gk.ConfigError, match=rf"whose {name} is missing: .*graphkit\.RequestPool"):
        gk.SpeculativeEngine(model, gk.NgramDrafter(), **options)
    gk.SpecStepRunner(model, gk.NgramDrafter(), **options).close()


class WritingForward:
    """A table of successors, which stores a number per row through the backend."""

    def __init__(self, backend):
        self._attention = backend

    def __call__(self, inputs):
        rows = torch.stack([inputs.input_ids.float(), inputs.positions.float()], 1)[:, None]
        self._attention.attend(0, rows, rows, rows, inputs.out_cache_loc, inputs.attention)
        following = (3 * inputs.input_ids + 1) % 8
        return gk.ForwardOutput(
            next_token_logits=4.0 * torch.nn.functional.one_hot(following, 8).float()
        )


def engine(**options):
    table, pool = (
        BlockTable(2, 32, "cpu"),
        StackedPool(64, 1, 1, 1, 2, "cpu"),
    )
    backend = GatherAttention(table, pool)
    model = gk.EngineModel(WritingForward(backend), backend)
    sizes = replace(SIZES, max_context_len=32)
    return gk.SpeculativeEngine(model, gk.NgramDrafter(), spec=SPEC, sizes=sizes, **options)


@pytest.mark.slow
def test_an_engine_over_own_pools_is_captured_and_audited():
    target = gk.CaptureTarget(
        name="own", spec=SPEC, sizes=replace(SIZES, max_context_len=32), forwards={},
        sample_batch=lambda *_: None, engine=engine, batch_sizes=[1, 2],
    )  # fmt: skip
    assert gk.capture_target(target, device="cpu").mismatches == ()
    report = audit_target(target, device="cpu")
    assert [finding for finding in report.findings if finding.severity == "error"] == []


def test_buffers_of_an_own_pool_have_names():
    with engine(device="cpu", batch_sizes=[2], generation="v1") as made:
        names = made.runners[0].memory_names()["state"]
        assert "attention.kv_pool.kv" in names
