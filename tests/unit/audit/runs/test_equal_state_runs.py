"""Runs of a step start from equal state, and snapshots restore it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import graphkit as gk
from graphkit.audit.runs.equal_state_runs import NOT_FINITE, EqualStateRuns, compare_runs
from graphkit.graphs import StateSnapshot
from graphkit.runners.comparison import GRAPH_DIFFERS, PADDING_LEAKS
from no_metadata import NoMetadata

CPU = torch.device("cpu")
VOCAB, SIZE = 16, 4


@pytest.fixture
def capture():
    """Return ``capture(mix, **state)``: a captured runner whose logits are ``mix(rows)``."""
    runners = []

    def make(mix, **state):
        def forward(inputs):
            rows = torch.nn.functional.embedding(inputs.input_ids, torch.eye(VOCAB))
            return gk.ForwardOutput(next_token_logits=mix(rows))

        runner = gk.DecodeRunner(
            forward, spec=gk.SpecConfig("NONE", 0, 1, 1), batch_sizes=[SIZE], device="cpu",
            sizes=gk.BufferSizes(SIZE, 64, 8, VOCAB, torch.float32), mutable_state=state,
        )  # fmt: skip
        runner.capture()
        runners.append(runner)
        return runner

    yield make
    for runner in runners:
        runner.close()


def batch_of(live):
    return gk.TargetVerifyInputs(
        req_pool_indices=np.arange(1, live + 1),
        seq_lens=np.full(live, 5),
        input_ids=np.arange(live),
        positions=np.full(live, 5),
        out_cache_loc=np.arange(1, live + 1),
    )


def kinds(runner, live=3):
    return [each.kind for each in compare_runs(runner, batch_of(live), SIZE).mismatches]


@pytest.mark.parametrize(
    ("value", "is_reported"), [(float("nan"), True), (float("inf"), True), (-float("inf"), False)]
)
def test_output_that_is_not_finite_is_a_mismatch_although_all_runs_agree(
    capture, value, is_reported
):
    mask = torch.arange(VOCAB) == 3
    runner = capture(lambda rows: rows.masked_fill(mask, value))
    assert kinds(runner) == ([NOT_FINITE] if is_reported else [])


def test_a_row_of_nothing_but_minus_infinity_is_not_finite(capture):
    assert kinds(capture(lambda rows: rows - float("inf"))) == [NOT_FINITE]


def test_a_snapshot_restores_state_random_numbers_and_the_host():
    state, calls = torch.arange(3.0), []
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    with StateSnapshot({"state": state}, CPU, lambda: calls.append(1)) as snapshot:
        assert not snapshot.drew_random_numbers()
        state.fill_(7)
        torch.rand(1)
        assert snapshot.drew_random_numbers()
        snapshot.restore()
        assert state.tolist() == [0, 1, 2]
        state.fill_(8)
    assert state.tolist() == [0, 1, 2]
    assert torch.equal(torch.rand(2), expected)
    assert len(calls) == 2


def test_a_snapshot_restores_after_an_error():
    state = torch.zeros(1)
    with pytest.raises(ZeroDivisionError), StateSnapshot({"state": state}, CPU):
        state.fill_(1 / 0)
    assert state.item() == 0


def test_every_run_starts_from_the_same_state(capture):
    counter = torch.zeros(())
    runner = capture(lambda rows: rows + counter.add_(1) + torch.rand(()), counter=counter)
    with StateSnapshot({"counter": counter}, CPU) as start:
        runs = EqualStateRuns(runner, batch_of(3), SIZE, start)
        first = runs.padded()
        for output in (runs.padded(), runs.replay(), runs.replay(runner.graphs[SIZE])):
            assert torch.equal(output["next_token_logits"], first["next_token_logits"])
        assert runs.padding_difference() is None
    assert counter.item() == 0
    assert runner.stats.replays == 1


def test_runs_restore_the_state_when_their_block_ends(capture):
    counter = torch.zeros(())
    runner = capture(lambda rows: rows + counter.add_(1), counter=counter)

    def interrupted():
        with EqualStateRuns(runner, batch_of(3), SIZE) as runs:
            runs.replay()
            assert counter.item() == 1
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert counter.item() == 0


def test_pads_and_state_of_a_variation_reach_replays_and_padded_runs_alone(capture):
    bias = torch.zeros(())
    runner = capture(lambda rows: rows + bias, bias=bias)
    full, live = batch_of(SIZE), 2
    runs = EqualStateRuns(
        runner, batch_of(live), SIZE, padded_batch=full, prepare=lambda: bias.fill_(1),
        read_state=lambda: {"bias": bias.clone()[None]},
    )  # fmt: skip
    with runs:
        for output in (runs.replay(), runs.padded()):
            assert output["next_token_logits"].shape == (live, VOCAB)
            assert output["next_token_logits"].min() == 1
            assert output["bias"].tolist() == [1]
        assert runs.unpadded()["next_token_logits"].min() == 0
        assert [*runs.unpadded()] == ["next_token_logits"]
    assert bias.item() == 0


def test_a_step_that_draws_random_numbers_is_right(capture):
    assert kinds(capture(lambda rows: rows + torch.rand(()))) == []


def test_graph_and_padding_are_judged_apart(capture):
    scale = [1.0]
    runner = capture(lambda rows: (rows + rows.mean(0)) * scale[0])
    assert kinds(runner) == [PADDING_LEAKS]
    assert kinds(runner, live=SIZE) == []
    scale[0] = 2.0
    assert kinds(runner) == [GRAPH_DIFFERS, PADDING_LEAKS]


def test_a_comparison_returns_the_replay_and_its_largest_difference(capture):
    scale = [1.0]
    runner = capture(lambda rows: rows * scale[0])
    scale[0] = 3.0
    comparison = compare_runs(runner, batch_of(2), SIZE)
    assert comparison.replayed["next_token_logits"].argmax(1).tolist() == [0, 1]
    assert comparison.largest_difference == 2.0
    (mismatch,) = comparison.mismatches
    assert (mismatch.mode, mismatch.batch_size, mismatch.padded_batch_size) == ("DECODE", 2, SIZE)
    assert (mismatch.expected, mismatch.got) == (3.0, 1.0)


def test_state_that_a_snapshot_cannot_restore_is_left_out(capture):
    """An attention backend may hold expanded tensors."""

    class Attention(NoMetadata):
        def __init__(self):
            super().__init__()
            self.ones = torch.ones(1).expand(4)

    runner = capture(lambda rows: rows)
    with gk.DecodeRunner(
        runner.step.forward, spec=runner.spec, sizes=runner.sizes, batch_sizes=[SIZE],
        device="cpu", attention=Attention(),
    ) as held:  # fmt: skip
        held.capture()
        assert kinds(held) == []
