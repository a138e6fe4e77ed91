"""What is measured of an engine's steps."""

from __future__ import annotations

from contextlib import ExitStack, closing
from types import SimpleNamespace

import pytest

from graphkit.cli.benchmarks import MeasuredEngine, Steps, Variant, measured_engine
from graphkit.cli.benchmarks.step_bench import pieces
from graphkit.engine.step import SpecStepRunner
from graphkit.engine.step.admission import Admission
from graphkit.errors import ConfigError
from graphkit.models import random_model

LOOP = Variant("loop of 3", "v3", 3)


@pytest.fixture(scope="module")
def models():
    return random_model("tiny", "EAGLE", device="cpu")


@pytest.fixture
def measured(models):
    """Return ``measured(variant)``, which opens an engine for two requests."""
    with ExitStack() as stack:

        def opened(variant: Variant, *, context: int = 64, **options) -> MeasuredEngine:
            engine = models.engine(
                num_steps=1, max_batch_size=2, batch_sizes=[2],
                max_context_len=context, generation=variant.generation,
                steps_per_launch=variant.steps_per_launch, **options,
            )  # fmt: skip
            stack.enter_context(engine)
            return MeasuredEngine(engine, variant, pieces(range(64), 2, 5), 6)

        yield opened


@pytest.mark.parametrize(("variant", "steps"), [(Variant("v2", "v2"), 4), (LOOP, 6)])
def test_a_round_runs_whole_launches(measured, variant, steps):
    engine, seen = measured(variant), Steps()
    engine.run(4, seen)
    assert len(seen.intervals_ms) == steps
    assert len(seen.ms) == 1
    assert 2 * steps <= seen.tokens < sum(map(len, engine.outputs)), "without the warm-up"


def test_a_round_counts_no_step_that_was_enqueued_before_it(measured, monkeypatch):
    engine, launched = measured(LOOP), []
    launch = SpecStepRunner.launch
    monkeypatch.setattr(
        SpecStepRunner, "launch", lambda *a, **k: launched.append(k) or launch(*a, **k)
    )
    engine.run(9, Steps())
    assert engine._requests[0].num_verifies == LOOP.steps_in_flight + 9
    assert len(launched) == 6, "two of the warm-up, three of the round, and one that is in flight"


def test_a_round_begins_when_all_prompts_are_prefilled(measured, monkeypatch):
    engine = measured(LOOP, context=96, chunked_prefill_size=1)
    restart, prefilled = MeasuredEngine._restart, []

    def restarted(self):
        restart(self)
        monkeypatch.setattr(Admission, "prefill", lambda *_: prefilled.append(1))

    monkeypatch.setattr(MeasuredEngine, "_restart", restarted)
    engine.run(4, Steps())
    assert not prefilled
    first, last = (request.num_verifies for request in engine._requests)
    assert first > last, "the first request ran steps while the second was prefilled"
    assert last == LOOP.steps_in_flight + 6


class SimulatedEngine:
    """An engine whose device takes 1 ms per step, and whose host is sometimes late.

    Like the engine, it launches the next steps before it reads those that are enqueued.

    Args:
        variant: How it runs its steps.
        late_at: Numbers of steps after whose delivery the host loses 40 ms.
    """

    context_limit = 1 << 20

    def __init__(self, variant, late_at=()):
        self.now, self.device_ends, self.late_at = 0.0, 0.0, late_at
        self.launches_ahead = int(variant.generation != "v1")
        self.steps_per_launch, self.launches = variant.steps_per_launch, []
        backend = SimpleNamespace(wait_for_device=self.wait_for_device)
        self.runners = [SimpleNamespace(backend=backend)]
        self.stats = SimpleNamespace(plain_seconds=0.0, step_seconds=0.0)

    def capture(self):
        pass

    def abort(self, request):
        pass

    def submit(self, prompt, sampling):
        self.request = SimpleNamespace(
            num_verifies=0, is_finished=False, output_ids=[], drafted_lengths={}
        )
        return self.request

    def wait_for_device(self):
        self.now = max(self.now, self.device_ends)

    def step(self):
        while len(self.launches) <= self.launches_ahead:
            begin = max(self.now, self.device_ends)
            ends = [begin + 1e-3 * number for number in range(1, self.steps_per_launch + 1)]
            self.launches.append(ends)
            self.device_ends = ends[-1]
        oldest = self.launches[0]
        self.now = max(self.now, oldest[0])
        while oldest and oldest[0] <= self.now:
            oldest.pop(0)
            self.request.num_verifies += 1
            self.request.output_ids.append(0)
        self.launches = [launch for launch in self.launches if launch]
        if self.request.num_verifies in self.late_at:
            self.now += 0.04


@pytest.mark.parametrize("variant", [Variant("v1", "v1"), Variant("v2", "v2"), LOOP])
@pytest.mark.parametrize("late_at", [(), (3, 5, 6), (18,), (6, 12, 18)])
def test_no_counted_step_begins_before_the_clock(monkeypatch, variant, late_at):
    engine, seen = SimulatedEngine(variant, late_at), Steps()
    monkeypatch.setattr(measured_engine.time, "perf_counter", lambda: engine.now)
    MeasuredEngine(engine, variant, [[1]], 6).run(12, seen)
    assert (len(seen.intervals_ms), seen.tokens) == (12, 12)
    assert seen.ms[0] >= 1 - 1e-6, "12 steps of the device take 12 ms"
    if not late_at:
        assert seen.ms[0] == pytest.approx(1.0)


def test_all_rounds_measure_the_same_steps(measured):
    engines, rounds = [measured(LOOP), measured(Variant("v2", "v2"))], []
    for engine in engines * 2:
        engine.run(6, Steps())
        rounds.append([tokens[:12] for tokens in engine.outputs])
    assert rounds[0] == rounds[1] == rounds[2] == rounds[3]


def test_a_request_that_ends_is_an_error(measured):
    with pytest.raises(ConfigError, match=r"reached its limit of \d+ tokens .* fewer steps"):
        measured(LOOP, context=16).run(100, Steps())


def test_the_bare_step_continues_the_requests(measured):
    engine = measured(LOOP)
    with closing(engine.bare_step()) as bare:
        (row, _) = engine._rows()
        before = int(engine._runner().state.seq_lens[row])
        assert bare.ms(3) > 0
        assert int(engine._runner().state.seq_lens[row]) >= before + 3
        nodes = bare.nodes()
    phases = {name.removeprefix("own nodes, ") for name in nodes if name.startswith("own nodes, ")}
    assert phases >= {"draft", "verify", "accept", "extend"}
    assert sum(nodes[f"own nodes, {phase}"] for phase in phases) == nodes["own nodes"]
    assert 0 < nodes["own nodes"] < nodes["nodes"]


def test_the_bare_step_begins_at_the_same_tokens_after_any_measurement(measured):
    lengths = []
    for steps in (0, 9):
        engine = measured(LOOP)
        if steps:
            engine.run(steps, Steps())
        with closing(engine.bare_step()):
            lengths.append(engine._runner().state.seq_lens[engine._rows()].tolist())
    assert lengths[0] == lengths[1]


def test_the_bare_step_is_greedy_as_the_loops_are(measured):
    with closing(measured(LOOP).bare_step()) as bare:
        operations = {origin.op for origin in bare._runner.graphs[2].origins}
    assert "graphkit::accept_tokens" in operations
    assert "graphkit::target_probs" not in operations


def test_steps_that_arrive_together_have_no_interval():
    steps = Steps(ms=[2.0, 4.0, 3.0], intervals_ms=[4.0, 0.0, 4.0, 4.0], tokens=12)
    assert (steps.ms_per_step, steps.latency_ms(50), steps.latency_ms(0)) == (3.0, 4.0, 0.0)
    assert steps.tokens_per_second == 1000.0


def test_prompts_are_different_pieces_of_a_text():
    assert pieces([1, 2, 3, 4, 5, 6], 2, 2) == [[1, 2], [3, 4]]
    short = pieces([1, 2, 3], 4, 5)
    assert [len(piece) for piece in short] == [5] * 4
    assert len({tuple(piece) for piece in short}) > 1
