"""Memory of engines: predicted before the capture, beside what the captures take."""

from __future__ import annotations

import pytest
import torch

from graphkit.errors import RecordError, ReplayError
from graphkit.graphs import RecorderBackend
from graphkit.records import CaptureRecord, MemoryEstimate

SIZES = [1, 2, 3, 4, 5, 6, 8]
CASES = [
    pytest.param("EAGLE", {}, id="chain"),
    pytest.param("EAGLE", {"topk": 2}, id="tree"),
    pytest.param("EAGLE", {"num_steps": (0, 1, 3)}, id="adaptive chain"),
    pytest.param("NGRAM", {"num_steps": (0, 2)}, id="adaptive n-grams"),
    pytest.param("MULTI_LAYER_EAGLE", {}, id="layers"),
    pytest.param("NONE", {}, id="no drafts"),
    pytest.param("NONE", {"prefill_sizes": [4, 8, 12, 16, 20]}, id="prompts"),
]
every_case = pytest.mark.parametrize(("algorithm", "options"), CASES)
every_generation = pytest.mark.parametrize("generation", ["v1", "v2", "v3"])


@pytest.fixture(scope="session")
def device():
    """The recorder counts here; ``tests/gpu/test_memory_estimate.py`` measures on CUDA."""
    return "cpu"


class CountingRecorder(RecorderBackend):
    """Counts captures, and the graphs that are open."""

    def __init__(self):
        super().__init__()
        self.captures, self.graphs = 0, []

    def capture(self, *args, **options):
        self.captures += 1
        self.graphs.append(super().capture(*args, **options))
        return self.graphs[-1]

    @property
    def open_bytes(self):
        return sum(graph.pool_bytes for graph in self.graphs if graph.ops)


@pytest.mark.slow
@every_generation
@every_case
def test_the_prediction_is_what_the_capture_takes(
    make_engine, task, generation, algorithm, options
):
    backend = CountingRecorder()
    engine = make_engine(
        algorithm, **options, generation=generation, batch_sizes=SIZES, backend=backend
    )
    before = engine.estimate()
    assert backend.open_bytes == 0, "the graphs of an estimate are closed"
    assert all(runner.status == "planned" for runner in engine.runners)
    engine.capture()
    after = engine.estimate()
    assert after.graph_pools == backend.open_bytes > 0
    assert 0.97 < before.graph_pools / after.graph_pools < 1.03
    same = {**after.to_dict(), "graph_pools": before.graph_pools, "total": before.total}
    assert before.to_dict() == same, "all else exists before the capture"
    short = task.first(6)
    requests = engine.generate(short.prompts[:1], short.sampling()[0])
    assert requests[0].output_ids == short.expected[0]


@pytest.mark.slow
@every_generation
def test_the_number_of_sizes_does_not_change_the_number_of_captures(make_engine, generation):
    counts = []
    for sizes in ([1, 4, 8], list(range(1, 9))):
        backend = CountingRecorder()
        engine = make_engine(
            num_steps=(0, 1, 3), generation=generation, batch_sizes=sizes, backend=backend
        )
        engine.estimate()
        counts.append(backend.captures)
    assert counts[0] == counts[1]


def test_parts_are_the_bytes_of_their_tensors(make_engine):
    engine = make_engine(generation="v3", batch_sizes=[8])
    step = engine._spec_step
    found = engine.estimate()
    pools = {id(pool): pool for pool in step.pools[1:]}
    assert len(pools) == 2, "of the target and of the draft model, which several runners use"
    kv = [t for pool in pools.values() for t in pool.tensors().values()]
    assert found.kv == sum(t.untyped_storage().nbytes() for t in kv)
    assert found.recurrent_state == found.executables == 0
    table = step.context.req_to_token
    assert found.static_buffers > table.nbytes + sum(
        t.nbytes for t in step.state.tensors().values()
    )
    assert found.total == sum(value for key, value in found.to_dict().items() if key != "total")
    assert f"total {found.total / 2**20:,.1f} MiB" in str(found)
    assert MemoryEstimate.from_json(found.to_json()) == found


@pytest.mark.slow
def test_a_record_of_other_sizes_predicts_without_a_capture(make_engine):
    first = make_engine(generation="v3", batch_sizes=[1, 3, 8], num_steps=(0, 1, 3))
    (runner,) = first.runners
    record = runner.capture()
    backend = CountingRecorder()
    engine = make_engine(generation="v3", batch_sizes=SIZES, num_steps=(0, 1, 3), backend=backend)
    predicted = engine.estimate(record)
    assert backend.captures == 0
    engine.capture()
    assert 0.97 < predicted.graph_pools / engine.estimate().graph_pools < 1.03


def test_refusals(make_engine):
    engine = make_engine(generation="v2", batch_sizes=[2])
    other = make_engine(generation="v3", batch_sizes=[2])
    record = other.runners[0].capture()
    assert isinstance(record, CaptureRecord)
    with pytest.raises(RecordError, match="no graphs of TARGET_VERIFY of width 4; it has STEP"):
        engine.estimate(record)
    engine.close()
    with pytest.raises(ReplayError, match="the engine is closed"):
        engine.estimate()


def test_a_failed_estimate_leaves_nothing(make_engine, monkeypatch):
    backend = CountingRecorder()
    engine = make_engine(generation="v3", batch_sizes=[1, 2, 8], backend=backend)
    refused = RuntimeError("out of memory")
    capture, calls = backend.capture, []

    def failing(*args, **options):
        calls.append(1)
        if len(calls) == 5:
            raise refused
        return capture(*args, **options)

    monkeypatch.setattr(backend, "capture", failing)
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.estimate()
    assert backend.open_bytes == 0
    monkeypatch.undo()
    engine.capture()
    assert engine.generate([[1, 2]])[0].is_finished
    assert torch.is_grad_enabled()


def test_a_step_without_loops_is_predicted(make_engine):
    engine = make_engine(batch_sizes=SIZES)
    (runner,) = engine.runners
    runner.no_loop_reason = "cuda-bindings are not installed"
    before = engine.estimate()
    runner.capture()
    assert 0.97 < before.graph_pools / engine.estimate().graph_pools < 1.03
