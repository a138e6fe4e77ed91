"""Memory of runners, predicted from a few sizes; and the model of the prediction."""

from __future__ import annotations

import json

import pytest

import graphkit as gk
from graphkit.engine.attention import SdpaAttention
from graphkit.graphs import SizeTable
from graphkit.models.reference import reference_target
from graphkit.records import LoopBody, LoopRecord, ModeRecord, SizeRecord
from graphkit.runners.memory_estimate import GraphMemoryModel, mean_bytes_per_node, trial_sizes

SIZES = [1, 2, 3, 5, 6, 8]
MODES = list(reference_target("cpu").forwards)


@pytest.fixture(scope="module")
def target():
    return reference_target("cpu", max_batch_size=8)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_every_mode_is_predicted(target, mode):
    settings = {"batch_sizes": SIZES, "device": "cpu", "backend": gk.RecorderBackend()}
    with target.runner(mode, **settings) as runner:
        before = runner.estimate()
        record = runner.capture()
        after = runner.estimate()
    assert after.graph_pools == sum(size.pool_bytes for size in record.sizes) > 0
    assert 0.97 < before.graph_pools / after.graph_pools < 1.03
    assert 0.97 < before.total / after.total < 1.03
    (measured,) = before.graphs
    assert (measured.mode, measured.batch_sizes) == (mode.name, tuple(SIZES))
    assert measured.measured_sizes == (1, 5, 8)
    assert before.kv > 0


@pytest.mark.slow
def test_modes_of_a_target_are_predicted_together(target):
    options = {"batch_sizes": SIZES, "device": "cpu"}
    before = gk.estimate_target(target, **options, backend=gk.RecorderBackend())
    record = gk.capture_target(target, **options, backend=gk.RecorderBackend())
    bodies = [body for mode in record.modes for loop in mode.loops for body in loop.bodies]
    loops = [loop for mode in record.modes for loop in mode.loops]
    taken = sum(each.pool_bytes for each in (*record.sizes, *bodies, *loops))
    assert 0.97 < before.graph_pools / taken < 1.03
    assert [mode.mode for mode in before.graphs] == [mode.mode for mode in record.modes]
    one = gk.estimate_target(target, **options, modes=[gk.ForwardMode.DECODE])
    assert one.kv < before.kv, "the pools of draft models belong to other modes"


def test_shared_memory_counts_once(target):
    runners = [target.runner(mode, batch_sizes=[8], device="cpu") for mode in MODES[:2]]
    kv = {runner.estimate().kv for runner in runners}
    modes = gk.estimate_target(target, modes=MODES[:2], batch_sizes=[8], device="cpu")
    assert kv == {modes.kv}, "both modes have the target's pool"
    for runner in runners:
        runner.close()


def test_an_eager_mode_has_no_graphs():
    class NoModes(SdpaAttention):
        def supports(self, _mode):
            return False

    mode = gk.ForwardMode.DRAFT_EXTEND_V2
    made = reference_target("cpu", max_batch_size=2, attention=NoModes)
    with made.runner(mode, device="cpu") as runner:
        found = runner.estimate()
    (graphs,) = found.graphs
    assert (graphs.batch_sizes, graphs.pool_bytes) == ((), 0)
    assert found.total > 0


def test_refusals(target):
    runner = target.runner(MODES[0], batch_sizes=[8], device="cpu")
    other = target.runner(gk.ForwardMode.DECODE, batch_sizes=[8], device="cpu")
    with pytest.raises(
        gk.RecordError, match="no graphs of TARGET_VERIFY of width 4; it has DECODE"
    ):
        runner.estimate(other.capture())
    with pytest.raises(gk.ConfigError, match="record must be a graphkit"):
        runner.estimate("capture.json")
    runner.close()
    with pytest.raises(gk.ReplayError, match="needs an open runner"):
        runner.estimate()


# The model.


def size(batch_size, pool_bytes, executable_bytes=0):
    return SizeRecord(
        batch_size=batch_size, num_tokens=batch_size, num_nodes=9, capture_ms=1.0,
        pool_bytes=pool_bytes, executable_bytes=executable_bytes,
    )  # fmt: skip


def mode_of(*sizes, loops=()):
    return ModeRecord(
        mode="DECODE", tokens_per_request=1, host_planned=False, input_bytes=0, sizes=sizes,
        loops=loops,
    )  # fmt: skip


def graph_memory(mode, label, batch_sizes, *, shares_pool):
    model = GraphMemoryModel(mean_bytes_per_node([mode]), shares_pool=shares_pool)
    return model.predict(mode, label, batch_sizes)


def test_smaller_sizes_use_the_memory_of_the_largest_again():
    mode = mode_of(size(1, 20, 6), size(4, 0, 12), size(8, 4000, 36))
    few = graph_memory(mode, "DECODE", (1, 4, 8), shares_pool=True)
    many = graph_memory(mode, "DECODE", range(1, 9), shares_pool=True)
    assert few.pool_bytes == many.pool_bytes == 4020
    assert few.executable_bytes == 54
    assert many.executable_bytes == 8 * 9 * 2, "54 bytes for 27 nodes"
    assert graph_memory(mode, "DECODE", (8,), shares_pool=True).pool_bytes == 4000
    assert graph_memory(mode, "DECODE", (16,), shares_pool=True).pool_bytes == 8000


def test_recorded_graphs_share_nothing():
    mode = mode_of(size(1, 10), size(4, 40), size(8, 80))
    found = graph_memory(mode, "DECODE", (1, 2, 3, 4, 6, 8), shares_pool=False)
    assert found.pool_bytes == 10 + 20 + 30 + 40 + 60 + 80


def test_a_loop_copies_every_body():
    bodies = [
        LoopBody(batch_size=each, num_nodes=9, drafts=drafts, pool_bytes=each, executable_bytes=4)
        for each in (1, 8)
        for drafts in (0, 3)
    ]
    loop = LoopRecord(
        kind="greedy", prologue_nodes=3, bodies=tuple(bodies), pool_bytes=50, executable_bytes=30
    )
    mode = mode_of(size(1, 0, 4), size(8, 100, 4), loops=(loop,))
    found = graph_memory(mode, "STEP", (1, 2, 4, 8), shares_pool=True)
    assert found.pool_bytes == 100 + 2 * (1 + 8) + 50
    nodes, recorded = 4 * 9 + 3 + 2 * 8 * 9, 2 * 9 + 4 * 9 + 3 + 4 * 9
    assert found.executable_bytes == round(nodes * (2 * 4 + 4 * 4 + 30) / recorded)
    again = graph_memory(mode, "STEP", (1, 8), shares_pool=True)
    assert again.executable_bytes == 2 * 4 + 4 * 4 + 30


@pytest.mark.parametrize(
    ("sizes", "trial"),
    [([8], [8]), ([1, 8], [1, 8]), ([1, 2, 8], [1, 2, 8]), (range(1, 9), [1, 5, 8])],
)
def test_three_sizes_are_tried(sizes, trial):
    assert list(trial_sizes(SizeTable(8, sizes))) == trial


def test_the_record_has_the_parts(target):
    with target.runner(MODES[0], batch_sizes=[2], device="cpu") as runner:
        found = runner.estimate()
    body = json.loads(found.to_json())
    assert body["kind"] == "memory"
    assert body["graphs"][0]["batch_sizes"] == [2, 8]
    assert gk.MemoryEstimate.from_json(found.to_json()) == found
