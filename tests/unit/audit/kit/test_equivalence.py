"""``assert_replay_equivalent`` passes right replays and diagnoses wrong ones."""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings

import graphkit as gk
from declared_modes import every_mode
from graphkit.audit.finding_kinds import FindingKind
from graphkit.runners import Runner
from graphkit.testing import assert_replay_equivalent, assert_target_equivalent, batches
from no_metadata import NoMetadata

VERIFY, EXTEND_V2 = gk.ForwardMode.TARGET_VERIFY, gk.ForwardMode.DRAFT_EXTEND_V2
STEP = gk.ForwardMode.STEP
VOCAB = 16


def right(rows):
    return rows * 2


def leak_mean(rows):
    return rows + rows.mean(0)


LINE_OF_MEAN = f"kit/test_equivalence.py:{leak_mean.__code__.co_firstlineno + 1} in leak_mean"


@pytest.fixture
def capture(target_of):
    """Return ``capture(mix, **facts)``: runner and batches of a small target."""
    runners = []

    def make(mix, **facts):
        target = target_of(mix, **facts)
        runners.append(target.runner(VERIFY, device="cpu"))
        runners[-1].capture()
        return runners[-1], [target.batch(VERIFY, live, live) for live in (1, 2, 3)]

    yield make
    for runner in runners:
        runner.close()


def failure_of(runner, batches, **options):
    """Return the lines of the failure by label; the first line has the label ``""``."""
    with pytest.raises(AssertionError) as caught:
        assert_replay_equivalent(runner, batches, **options)
    head, *lines = str(caught.value).splitlines()
    return {"": head} | dict(line.strip().split(": ", 1) for line in lines)


@every_mode
def test_real_models_are_right_in_every_mode(real_target, mode):
    before = {name: tensor.clone() for name, tensor in real_target.mutable_state.items()}
    with real_target.runner(mode, batch_sizes=[3], device="cpu") as runner:
        runner.capture()
        assert_replay_equivalent(runner, (real_target.batch(mode, n, n) for n in (1, 2, 3)))
        assert runner.stats.replays == 3
    for name, tensor in real_target.mutable_state.items():
        assert torch.equal(tensor, before[name])


def test_a_leak_is_a_fault_of_padding(capture):
    runner, batches = capture(leak_mean)
    said = failure_of(runner, batches)
    assert said[""] == (
        "TARGET_VERIFY: the replay of 1 live request at captured size 3 is wrong: padding changes "
        "live rows."
    )
    assert said["at fault"] == "padding"
    assert said["where"] == "next_token_logits, row 0, request 0"
    assert said["probable bug"].startswith(
        "leaking pad row. The first node that differs is `mean`. Compute every row from "
    )
    assert said["at"] == f"(forward), {LINE_OF_MEAN}"
    difference = abs(float(said["expected"]) - float(said["got"]))
    assert difference > 0.01
    assert float(said["largest difference"]) >= difference * 0.99


def test_row_and_request_are_named(capture):
    """Only the last live row has a pad after it."""
    runner, batches = capture(lambda rows: rows + rows.roll(-1, 0))
    assert failure_of(runner, batches[1:])["where"] == "next_token_logits, row 3, request 1"


def test_a_frozen_value_is_a_fault_of_the_graph(capture):
    scale = [1.0]
    runner, batches = capture(lambda rows: rows * scale[0])
    assert_replay_equivalent(runner, batches)
    scale[0] = 2.0
    said = failure_of(runner, batches[2:])
    assert said[""].endswith("the graph differs from the same padded path without it.")
    assert said["at fault"] == "graph"
    assert said["probable bug"].startswith("frozen value. ")
    assert float(said["expected"]) == pytest.approx(2 * float(said["got"]), rel=1e-4)


def test_a_forward_that_differs_at_every_run_is_nondeterministic(capture):
    """Its counter is undeclared, so that no run restores it."""
    counter = torch.zeros(())
    runner, batches = capture(lambda rows: rows + counter.add_(0.5))
    said = failure_of(runner, batches)
    assert said["probable bug"].startswith("nondeterministic step. The first node that differs is")
    assert "in <lambda>" in said["at"]


def test_a_forward_that_counts_its_runs_is_nondeterministic(capture):
    runs = []
    runner, batches = capture(lambda rows: rows * (runs.append(1) or len(runs)))
    assert failure_of(runner, batches)["probable bug"].startswith("nondeterministic step. ")


def test_the_number_of_pads_may_matter_although_their_contents_do_not(capture):
    runner, batches = capture(lambda rows: rows / len(rows))
    assert failure_of(runner, batches)["probable bug"].startswith(
        "dependence on the batch size. The first node that differs is `div`. "
    )


def test_undeclared_state_is_named_before_what_follows_from_it(capture):
    class Remembering:
        def __init__(self):
            self.last = torch.zeros(9, VOCAB)

        def __call__(self, rows):
            before = self.last[1 : 1 + len(rows)].clone()
            self.last[1 : 1 + len(rows)] = rows
            return rows + before

    runner, batches = capture(Remembering())
    bug = failure_of(runner, [batches[2]])["probable bug"]
    assert bug.startswith("undeclared state. A replay changes `")
    assert "last`. Declare it as mutable_state" in bug


def test_tolerance_is_for_padding_alone(capture):
    runner, batches = capture(lambda rows: rows * (1 + 1e-3 * len(rows)))
    assert failure_of(runner, batches)["at fault"] == "padding"
    assert_replay_equivalent(runner, batches, rtol=5e-3)
    assert_replay_equivalent(runner, batches, atol=1e-2)
    assert failure_of(runner, batches, atol=1e-4, rtol=1e-4)["at fault"] == "padding"
    scale = [1.0]
    runner, batches = capture(lambda rows: rows * scale[0])
    scale[0] = 1.0 + 1e-6
    assert failure_of(runner, batches, rtol=1.0, atol=1.0)["at fault"] == "graph"


def test_the_tolerance_multiplies_the_usual_rounding(capture):
    """The step differs by some 1000 ulp between 2 and 3 requests; 256 are allowed."""
    runner, batches = capture(lambda rows: rows * (1 + 5e-5 * len(rows)))
    said = failure_of(runner, batches)
    assert said["at fault"] == "padding"
    assert said["expected"] != said["got"]
    assert said["distance"].endswith(" ulp of float32")
    distance = float(said["distance"].split()[0])
    assert 256 < distance < 2048
    assert_replay_equivalent(runner, batches, tolerance=8)
    assert failure_of(runner, batches, tolerance=distance / 257)["at fault"] == "padding"


def test_the_tolerance_is_not_for_a_graph_of_a_deterministic_step(capture):
    scale = [1.0]
    runner, batches = capture(lambda rows: rows * scale[0])
    scale[0] = 1.0 + 1e-6
    assert failure_of(runner, batches, tolerance=1e6)["at fault"] == "graph"


def test_a_graph_may_round_like_repeated_runs_of_its_step(capture):
    """As a sum with atomic additions does; its last bits depend on an undeclared counter."""
    counter = torch.zeros(())
    runner, batches = capture(lambda rows: rows * (1 + 1e-7 * (counter.add_(1) % 3)))
    assert_replay_equivalent(runner, batches)
    failed = failure_of(runner, batches, tolerance=1e-3)
    assert failed["probable bug"].startswith("nondeterministic step. ")


def test_a_full_batch_is_padded_to_a_larger_size_too(target_of):
    """A batch norm in training mode is right wherever a batch has a captured size of its own."""
    norm = torch.nn.BatchNorm1d(VOCAB)
    target = target_of(norm, mutable_state=dict(norm.named_buffers()))
    with target.runner(VERIFY, batch_sizes=[1, 2, 3], device="cpu") as runner:
        runner.capture()
        for live in (1, 2, 3):
            batch = target.batch(VERIFY, live, live)
            assert_replay_equivalent(runner, [batch], padded_batch_size=live)
        assert_replay_equivalent(runner, [target.batch(VERIFY, 3, 3)])
        said = failure_of(runner, [target.batch(VERIFY, 2, 2)])
    assert "2 live requests at captured size 3 is wrong" in said[""]
    assert said["probable bug"].startswith("leaking pad row. The first node that differs is `")


def test_every_batch_of_a_generator_is_compared(capture):
    runner, batches = capture(leak_mean)
    assert_replay_equivalent(runner, [batches[2]])
    said = failure_of(runner, (batch for batch in (batches[2], batches[2], batches[1])))
    assert "2 live requests" in said[""]


def test_a_larger_size_can_be_given(capture):
    runner, batches = capture(leak_mean)
    assert_replay_equivalent(runner, batches[:1], padded_batch_size=1)
    assert (
        "1 live request at captured size 3"
        in failure_of(runner, batches[:1], padded_batch_size=3)[""]
    )


def test_state_and_step_are_restored_after_a_failure(capture):
    counter = torch.zeros(())

    def counting(rows):
        return rows + rows.mean(0) * counter.add_(1)

    runner, batches = capture(counting, mutable_state={"counter": counter})
    forward = runner.step.forward
    failure_of(runner, batches)
    assert counter == 0
    assert runner.step.forward is forward
    assert_replay_equivalent(runner, batches[:1], padded_batch_size=1)


def test_an_idle_batch_is_right(capture):
    runner, batches = capture(right)
    rows = {name: rows[:0] for name, rows in vars(batches[0]).items() if rows is not None}
    assert_replay_equivalent(runner, [gk.TargetVerifyInputs(**rows)])


def test_a_batch_that_falls_back_is_not_equivalent(capture):
    runner, _ = capture(right)
    batch = gk.TargetVerifyInputs(
        **{
            name: torch.ones(8 if name in ("input_ids", "positions", "out_cache_loc") else 4).to(t)
            for name, t in {
                "req_pool_indices": torch.int64, "seq_lens": torch.int32, "input_ids": torch.int64,
                "positions": torch.int64, "out_cache_loc": torch.int64,
            }.items()
        }
    )  # fmt: skip
    with pytest.raises(AssertionError, match="a batch of 4 requests has no graph: "):
        assert_replay_equivalent(runner, [batch])


def test_nothing_to_compare_is_an_error(capture):
    runner, batches = capture(right)
    with pytest.raises(gk.TargetError, match="no batch"):
        assert_replay_equivalent(runner, iter(()))
    runner.close()
    with pytest.raises(gk.ReplayError, match="runner is closed: there is no replay"):
        assert_replay_equivalent(runner, batches)


@pytest.mark.parametrize("name", ["rtol", "atol"])
@pytest.mark.parametrize("value", [-1e-3, float("nan"), "x"])
def test_an_invalid_tolerance_is_refused(target_of, name, value):
    with pytest.raises(gk.ConfigError, match=f"{name} must be a number of at least 0, got "):
        assert_target_equivalent(target_of(right), device="cpu", **{name: value})


def test_a_tolerance_contradicts_a_limit_that_replaces_it(target_of):
    with pytest.raises(gk.ConfigError, match="which atol replaces"):
        assert_target_equivalent(target_of(right), device="cpu", tolerance=2, atol=1e-3)
    with pytest.raises(gk.ConfigError, match="tolerance must be a number above 0"):
        assert_target_equivalent(target_of(right), device="cpu", tolerance=0)


def test_a_planned_runner_is_refused(target_of):
    target = target_of(right)
    with pytest.raises(gk.ReplayError, match="runner is planned: there is no replay to compare"):
        assert_replay_equivalent(target.runner(VERIFY, device="cpu"), [target.batch(VERIFY, 1, 0)])


def test_a_mode_that_stays_eager_is_refused(real_target):
    runner = gk.DraftExtendV2Runner(
        print, spec=real_target.spec, sizes=real_target.sizes, device="cpu",
        attention=NoMetadata(EXTEND_V2),
    )  # fmt: skip
    runner.capture()
    with pytest.raises(gk.ReplayError, match="does not support DRAFT_EXTEND_V2 graphs: there is"):
        assert_replay_equivalent(runner, [real_target.batch(EXTEND_V2, 1, 0)])


def test_a_target_is_captured_in_every_mode_and_closed(target_of, monkeypatch):
    made, plan = [], gk.CaptureTarget.runner
    monkeypatch.setattr(
        gk.CaptureTarget,
        "runner",
        lambda self, *mode, **facts: made.append(plan(self, *mode, **facts)) or made[-1],
    )
    assert_target_equivalent(target_of(right, modes=("TARGET_VERIFY", "DECODE")), device="cpu")
    assert [runner.mode.name for runner in made] == ["TARGET_VERIFY", "DECODE"]
    assert {runner.status for runner in made} == {"closed"}
    assert [dict(runner.stats.replays_by_size) for runner in made] == [{1: 1, 3: 3}] * 2
    with pytest.raises(AssertionError, match="DECODE: the replay of 1 live request at captured"):
        assert_target_equivalent(
            target_of(leak_mean, modes=("TARGET_VERIFY", "DECODE")),
            modes=[gk.ForwardMode.DECODE], device="cpu", batch_sizes=[2],
        )  # fmt: skip
    assert isinstance(made[-1], Runner)
    assert made[-1].status == "closed"


def test_the_text_of_a_failure(capture):
    """The whole text, with numbers replaced."""
    runner, batches = capture(leak_mean)
    with pytest.raises(AssertionError) as caught:
        assert_replay_equivalent(runner, batches)
    assert re.sub(r"\d\.\d+", "N", str(caught.value)) == (
        "TARGET_VERIFY: the replay of 1 live request at captured size 3 is wrong: padding changes "
        "live rows.\n"
        "  at fault: padding\n"
        "  where: next_token_logits, row 0, request 0\n"
        "  expected: N\n"
        "  got: N\n"
        "  distance: Ne+06 ulp of float32\n"
        "  largest difference: N\n"
        "  probable bug: leaking pad row. The first node that differs is `mean`. "
        f"{FindingKind.LEAKING_PAD_ROW.advice}\n"
        f"  at: (forward), {LINE_OF_MEAN}"
    )


@dataclass(kw_only=True, eq=False)
class HeadInputs(gk.StepInputs):
    rows: gk.Rows = gk.declare(gk.Axis.REQUEST, torch.int64, "row in the request pool")
    hidden_states: gk.Rows = gk.declare(
        gk.Axis.REQUEST, gk.MODEL_DTYPE, "last hidden state", row=("H",), by_address=True
    )


@dataclass(kw_only=True, eq=False)
class HeadOutput(gk.Output):
    logits: torch.Tensor = gk.declare_output(gk.Axis.REQUEST, row=("V",))


@pytest.mark.parametrize("is_right", [True, False])
def test_a_step_of_declared_inputs_is_compared_like_any_mode(is_right):
    weight = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))

    def head(inputs):
        logits = inputs.hidden_states @ weight
        return HeadOutput(logits=logits if is_right else logits - logits.mean(0))

    sizes = gk.BufferSizes(4, 32, 8, 16, torch.float32)
    spec = gk.SpecConfig("NONE", 0, 1, 1)
    with gk.StepRunner(
        head, inputs=HeadInputs, output=HeadOutput, sizes=sizes, batch_sizes=[4], device="cpu"
    ) as runner:
        runner.capture()

        @settings(max_examples=10, deadline=None, derandomize=True)
        @given(batches(STEP, spec, sizes, inputs=HeadInputs, output=HeadOutput))
        def check(batch):
            assert_replay_equivalent(runner, [batch])

        if is_right:
            check()
        else:
            with pytest.raises(AssertionError, match="where: logits, row 0, request 0"):
                check()
