"""The whole step of the reference target on CUDA: captured, checked, inspected and audited."""

from __future__ import annotations

import pytest

import graphkit as gk
from graphkit.audit import audit_target
from graphkit.models.reference import dflash_target, eagle3_target, reference_target
from graphkit.views.module_tree import PHASES, node_phases

pytestmark = pytest.mark.gpu
STEP = gk.ForwardMode.STEP


@pytest.fixture(
    scope="module",
    params=[
        (reference_target, {"topk": 1}),
        (reference_target, {"topk": 2}),
        (eagle3_target, {"topk": 2}),
        (dflash_target, {}),
    ],
    ids=["chain", "tree", "EAGLE-3 tree", "DFLASH"],
)
def target(request):
    make, options = request.param
    return make("cuda", max_batch_size=8, **options)


@pytest.fixture(scope="module")
def record(target):
    options = {"modes": [STEP], "batch_sizes": [1, 4], "device": "cuda"}
    return gk.capture_target(target, **options, inspect=True)


def test_steps_and_loops_equal_those_without_a_graph(record):
    assert record.mismatches == ()
    (mode,) = record.modes
    assert [size.batches_compared for size in mode.sizes] == [1, 4, 8]
    assert [loop.kind for loop in mode.loops] == ["greedy", "sampled"]
    for loop in mode.loops:
        assert 6 <= loop.steps_compared <= 8, "fewer only after the last request"
        assert loop.prologue_nodes > 0
        for body, size in zip(loop.bodies, mode.sizes, strict=True):
            assert body.batch_size == size.batch_size
            assert abs(body.num_nodes - size.num_nodes) < 20


def test_every_phase_has_measured_nodes(record):
    for graph in record.graphs:
        pairs = zip(node_phases(graph), graph.nodes, strict=True)
        phases = {phase for phase, node in pairs if node.duration_us}
        assert phases >= set(PHASES)
        assert sum(not phase for phase in node_phases(graph)) < 10, "refresh and begin_step"


def test_the_loop_is_audited(target):
    report = audit_target(
        target, only=["loop", "pads"], modes=[STEP], batch_sizes=[1, 4], device="cuda"
    )
    assert report.findings == ()
    texts = {check.audit: check.text for check in report.checks}
    assert texts["loop"] == "8 steps in one launch: no difference"
    assert texts["pads"].startswith("not checked: STEP is the whole step of the engine")
