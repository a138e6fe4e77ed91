"""Memory of graphs on CUDA: predicted from three sizes, beside what all sizes take."""

from __future__ import annotations

import gc
import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest
import torch

import graphkit as gk
from graphkit.graphs.driver import driver_bytes
from small_llama import StandaloneForward, small_llama

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1,
        reason="the driver counts the memory of all processes of a device: run it without xdist",
    ),
]
LARGEST, WIDTH, VOCAB, HIDDEN, LAYERS, CONTEXT = 64, 4, 32_000, 1024, 4, 512
SIZES = gk.SizeTable(LARGEST).sizes
"""The default list, of which an estimate captures three."""
SPEC = gk.SpecConfig("STANDALONE", WIDTH - 1, 1, WIDTH)
ADAPTIVE = gk.SpecConfig("STANDALONE", (0, 1, 3), 1, WIDTH)


@pytest.fixture(scope="module")
def model():
    return make_model()


def make_model():
    return small_llama(
        std=0.02, device="cuda", dtype=torch.bfloat16, vocab_size=VOCAB, hidden_size=HIDDEN,
        intermediate_size=2816, num_hidden_layers=LAYERS, num_attention_heads=16,
        num_key_value_heads=4, head_dim=64, max_position_embeddings=CONTEXT,
    )  # fmt: skip


def make_engine(model, generation, spec):
    requests = gk.ReqToTokenPool(LARGEST, CONTEXT, "cuda")

    def attention():
        pool = gk.MHATokenToKVPool(
            LARGEST * CONTEXT, 1, torch.bfloat16, 4, 64, LAYERS, torch.device("cuda")
        )
        return gk.TritonAttention(requests, pool)

    target, draft = attention(), attention()
    return gk.SpeculativeEngine(
        gk.EngineModel(StandaloneForward(model, target), target),
        gk.EagleDrafter(gk.EngineModel(StandaloneForward(model, draft), draft)),
        spec=spec,
        sizes=gk.BufferSizes(LARGEST, CONTEXT, HIDDEN, VOCAB, torch.bfloat16),
        batch_sizes=SIZES,
        backend=gk.CudaBackend(),
        generation=generation,
    )


def used():
    """Return the device's used memory that is not free in torch's cache."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free


def predicted(generation, spec):
    with make_engine(make_model(), generation, spec) as engine:
        return engine.estimate()


def measured(generation, spec):
    """Return the memory after a capture, and the bytes of the pool."""
    with make_engine(make_model(), generation, spec) as engine:
        engine.capture()
        return engine.estimate(), engine.runners[0].backend.pool.num_bytes()


def in_new_process(function, *args):
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        return process.submit(function, *args).result()


@pytest.mark.parametrize("generation", ["v2", "v3"])
@pytest.mark.parametrize("spec", [SPEC, ADAPTIVE], ids=["fixed", "adaptive"])
def test_the_prediction_is_within_a_tenth(generation, spec):
    """In two processes, since a capture uses memory that destroyed executables left."""
    before = in_new_process(predicted, generation, spec)
    after, pool_bytes = in_new_process(measured, generation, spec)
    text = f"predicted {before}\nmeasured {after}"
    assert after.graph_pools == pool_bytes
    assert 0.9 < before.graph_pools / after.graph_pools < 1.1, text
    assert 0.9 < before.total / after.total < 1.1, text
    graphs = before.graph_pools + before.executables
    assert 0.9 < graphs / (after.graph_pools + after.executables) < 1.1, text
    assert before.to_dict().keys() == after.to_dict().keys()
    for part in ("kv", "recurrent_state", "workspace", "static_buffers"):
        assert before.to_dict()[part] == after.to_dict()[part], part


def test_an_estimate_leaves_no_memory(model):
    with make_engine(model, "v2", SPEC) as engine:
        engine.estimate()  # compiles kernels, which stay loaded
        first = used()
        engine.estimate()
        assert abs(used() - first) < 8 << 20
        assert engine.runners[0].backend.pool.num_bytes() == 0


def test_a_runner_and_a_record_predict_the_same(model):
    with make_engine(model, "v2", SPEC) as engine:
        runner = engine.runners[0]
        alone = runner.estimate()
        record = runner.capture()
        taken = runner.estimate()
        assert 0.9 < alone.graph_pools / taken.graph_pools < 1.1
        assert runner.estimate(record).graph_pools == taken.graph_pools


def test_memory_of_executables_is_the_drivers(make_runner):
    """Graphs of a step with many nodes take memory that is not torch's."""
    runner = make_runner(batch_sizes=list(range(1, 17)))
    runner.estimate()
    before = driver_bytes(runner.device)
    record = runner.capture()
    executables = sum(size.executable_bytes for size in record.modes[0].sizes)
    assert executables == pytest.approx(driver_bytes(runner.device) - before, abs=2 << 20)
