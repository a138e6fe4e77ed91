"""An engine is the only user of its pools, until it closes or is dropped."""

from __future__ import annotations

import gc

import pytest
import torch

import graphkit as gk
from engine_runs import refuses
from engine_target import CONTEXT, ROWS, SIZES, SPEC, TableForward
from graphkit.engine.kv import RecurrentStatePool
from graphkit.engine.request_memory import RequestMemory
from own_attention import BlockTable, GatherAttention, StackedPool

PARAMS = gk.SamplingParams(max_new_tokens=9)


def make_pools(device):
    requests = gk.ReqToTokenPool(ROWS, CONTEXT, device)
    return requests, gk.MHATokenToKVPool(ROWS * CONTEXT, 1, torch.float32, 1, 1, 1, device)


def model_over(requests, pool, states=None):
    kind = gk.TritonAttention if requests.device.type == "cuda" else gk.SdpaAttention
    forward = TableForward(pool, requests.device)
    return gk.EngineModel(forward, kind(requests, pool), states)


@pytest.fixture
def model(device):
    return model_over(*make_pools(device))


def open_engine(model, **options):
    device = model.attention.req_to_token_pool.device
    settings = {"spec": SPEC, "sizes": SIZES, "device": device}
    return gk.SpeculativeEngine(model, gk.NgramDrafter(), **settings | options)


def open_runner(model):
    return gk.SpecStepRunner(
        model, gk.NgramDrafter(), spec=SPEC, sizes=SIZES, device=model.attention.kv_pool.device
    )


ENGINE = "an open SpeculativeEngine uses it, and both would allocate rows"


def assert_works(engine):
    (request,) = engine.generate([[1, 2]], PARAMS)
    assert len(request.output_ids) == 9


def test_a_second_engine_over_one_model_is_refused(model):
    with open_engine(model) as first:
        with pytest.raises(gk.ConfigError, match=f"cannot use this ReqToTokenPool: {ENGINE}") as it:
            open_engine(model)
        assert it.value.field == "target"
        assert_works(first)
    with open_engine(model) as second:
        assert_works(second)


def test_each_pool_has_one_engine(device):
    requests, pool = make_pools(device)
    states = RecurrentStatePool(ROWS, SPEC.num_draft_tokens, 1, device, shapes={"sum": (1,)})
    with open_engine(model_over(requests, pool, states)):
        others = make_pools(device)
        for pools, name in (
            ((requests, others[1]), "ReqToTokenPool"),
            ((others[0], pool), "MHATokenToKVPool"),
            ((*others, states), "RecurrentStatePool"),
        ):
            with pytest.raises(gk.ConfigError, match=f"cannot use this {name}: {ENGINE}"):
                open_engine(model_over(*pools))
        open_engine(model_over(*others)).close()


def test_pools_that_derive_from_no_class_of_graphkit_have_one_engine():
    def own_model(table, pool):
        return gk.EngineModel(lambda inputs: None, GatherAttention(table, pool))

    def own_pools():
        table = BlockTable(ROWS, CONTEXT, "cpu")
        return table, StackedPool(ROWS * CONTEXT, 1, 1, 1, 16, "cpu")

    def open_own_engine(*pools):
        return open_engine(own_model(*pools))

    table, pool = own_pools()
    with open_own_engine(table, pool):
        others = own_pools()
        for pools, name in (
            ((table, others[1]), "BlockTable"),
            ((others[0], pool), "StackedPool"),
        ):
            with pytest.raises(gk.ConfigError, match=f"cannot use this {name}: {ENGINE}"):
                open_own_engine(*pools)
        open_own_engine(*others).close()
    open_own_engine(table, pool).close()


def test_an_engine_without_a_free_row_is_refused(model):
    """It would admit no request, and ``generate`` would not end."""
    pool = model.attention.req_to_token_pool
    rows = pool.alloc(ROWS)
    with refuses(gk.ConfigError, "req_to_token_pool", f"of its {ROWS} rows, none is free"):
        open_engine(model)
    pool.free(rows[:1])
    with open_engine(model) as engine:
        assert_works(engine)


def test_an_engine_that_is_refused_does_not_hold_its_pools(model):
    with refuses(gk.ConfigError, "max_context_len", "max_context_len is"):
        open_engine(model, sizes=gk.BufferSizes(ROWS, 3, 1, 16, torch.float32))
    open_engine(model).close()


def test_an_engine_whose_construction_is_interrupted_frees_its_rows(model, monkeypatch):
    free_all = RequestMemory.free_all

    def interrupted_once(memory):
        monkeypatch.setattr(RequestMemory, "free_all", free_all)
        raise KeyboardInterrupt

    monkeypatch.setattr(RequestMemory, "free_all", interrupted_once)
    with pytest.raises(KeyboardInterrupt):
        open_engine(model)
    with open_engine(model) as engine:
        assert engine.memory.available_rows == ROWS
        assert_works(engine)


@pytest.mark.parametrize("generation", ["v1", "v2", "v3"])
@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
def test_an_engine_that_is_dropped_frees_its_rows(model, generation, captured):
    engine = open_engine(model, generation=generation, batch_sizes=[ROWS], steps_per_launch=1)
    if captured:
        engine.capture()
    for _ in range(ROWS):  # more tokens than a step can deliver
        engine.submit([1, 2], gk.SamplingParams(max_new_tokens=40))
    engine.step()
    assert not model.attention.req_to_token_pool.available
    del engine
    assert model.attention.req_to_token_pool.available == ROWS
    with open_engine(model, generation=generation) as second:
        assert_works(second)


def test_an_engine_that_is_dropped_in_a_cycle_is_collected(model):
    engine = open_engine(model)
    engine.submit([1, 2], PARAMS)
    engine.step()
    engine.myself = engine
    gc.disable()
    try:
        del engine
        with open_engine(model) as second:
            assert second.memory.available_rows == ROWS
            assert_works(second)
    finally:
        gc.enable()


def test_runners_share_a_pool_but_not_with_an_engine(model):
    with open_runner(model), open_runner(model):
        text = "an open SpecStepRunner uses it, and the engine would allocate rows and KV slots"
        with pytest.raises(gk.ConfigError, match=text):
            open_engine(model)
    with open_engine(model) as engine:
        text = "SpecStepRunner cannot use this ReqToTokenPool: an open SpeculativeEngine uses it"
        with pytest.raises(gk.ConfigError, match=text):
            open_runner(model)
        assert_works(engine)
    open_runner(model).close()


def test_closing_twice_does_not_release_the_pools_of_another(model):
    first = open_engine(model)
    first.close()
    with open_engine(model):
        first.close()
        with pytest.raises(gk.ConfigError, match=ENGINE):
            open_engine(model)
