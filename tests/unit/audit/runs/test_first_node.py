"""The first node at which two runs of a forward differ, by the memory that leads to the output."""

from __future__ import annotations

import pytest
import torch

import graphkit as gk
from graphkit.audit.runs.equal_state_runs import EqualStateRuns
from graphkit.audit.runs.first_node import first_node
from graphkit.audit.runs.forward_trace import traced
from graphkit.audit.runs.live_rows import RowPlaces, matched_rows, same_rows
from graphkit.graphs import StateSnapshot
from graphkit.runners.comparison import Rounding

HIDDEN, VOCAB, WIDTH = 6, 16, 2
VERIFY = gk.ForwardMode.TARGET_VERIFY


def batch_of(requests, seed=0):
    generator = torch.Generator().manual_seed(seed)
    rows = requests * WIDTH
    return gk.TargetVerifyInputs(
        req_pool_indices=torch.arange(1, requests + 1),
        seq_lens=torch.randint(3, 9, (requests,), generator=generator).int(),
        input_ids=torch.randint(1, VOCAB, (rows,), generator=generator),
        positions=torch.randint(1, 9, (rows,), generator=generator),
        out_cache_loc=torch.arange(1, rows + 1),
    )


@pytest.fixture
def runner_of():
    """Return ``runner_of(mix)``: captured at 2 and 5, ``mix(rows, inputs)`` makes the logits."""
    runners = []

    def make(mix):
        table = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(0))
        head = torch.randn(HIDDEN, VOCAB, generator=torch.Generator().manual_seed(1))

        def forward(inputs):
            rows = table[inputs.input_ids]
            return gk.ForwardOutput(next_token_logits=mix(rows, inputs) @ head)

        runners.append(
            gk.TargetVerifyRunner(
                forward, spec=gk.SpecConfig("NGRAM", WIDTH - 1, 1, WIDTH), batch_sizes=[2, 5],
                sizes=gk.BufferSizes(5, 64, HIDDEN, VOCAB, torch.float32), device="cpu",
            )
        )  # fmt: skip
        runners[-1].capture()
        return runners[-1]

    yield make
    for runner in runners:
        runner.close()


def with_pads(runner, live=3, size=5):
    with StateSnapshot({}, runner.device) as start:
        return EqualStateRuns(runner, batch_of(live), size, start).first_node()


def in_order(runner, order):
    batch = batch_of(len(order))
    other = gk.TargetVerifyInputs(
        **{
            name: rows.view(len(order), -1)[list(order)].flatten()
            for name, rows in vars(batch).items()
            if rows is not None
        }
    )
    tokens = torch.arange(len(order) * WIDTH).view(-1, WIDTH)[list(order)].flatten().tolist()
    runs = (lambda: runner.fall_back(batch)), (lambda: runner.fall_back(other))
    rows = matched_rows(*map(RowPlaces.in_order, (order, tokens)))
    return first_node(runner.step, runs, rows, Rounding(torch.float32))


def places(first):
    return first.short_name, first.origin.source.rpartition(" ")[2]


def sound(rows, inputs):
    lengths = inputs.seq_lens.max()  # differs with pads, and no live row follows from it
    mask = torch.arange(9)[None] < inputs.seq_lens.minimum(lengths)[:, None]
    indptr = torch.arange(inputs.batch_size + 1) * WIDTH
    of_request = mask.sum(1).repeat_interleave(WIDTH, output_size=len(rows))
    return (
        rows.view(-1, WIDTH, HIDDEN)
        .transpose(0, 1)
        .transpose(0, 1)
        .flatten(0, 1)[: indptr.numel() * WIDTH]
        * of_request[:, None]
    )


def test_a_sound_forward_has_no_first_node(runner_of):
    runner = runner_of(sound)
    assert with_pads(runner) is None
    assert in_order(runner, [2, 0, 1]) is None


def maximum(rows, inputs):
    unused = inputs.seq_lens.max() * 2
    largest = rows.abs().amax()
    return rows / largest + 0 * unused


def test_a_number_of_the_batch_is_the_cause_of_what_is_computed_from_it(runner_of):
    """The longest request differs as well, but times zero it changes no row."""
    batch = batch_of(3)
    runner = runner_of(maximum)
    with StateSnapshot({}, runner.device) as start:
        padded = gk.TargetVerifyInputs(
            **{
                name: torch.cat([rows, rows.new_full((len(rows) // 3 * 2,), value)])
                for name, value in (
                    ("req_pool_indices", 0), ("seq_lens", 30), ("input_ids", 9),
                    ("positions", 0), ("out_cache_loc", 0),
                )
                for rows in (getattr(batch, name),)
            }
        )  # fmt: skip
        first = EqualStateRuns(runner, batch, 5, start, padded_batch=padded).first_node()
    assert places(first) == ("amax", "maximum")
    assert (first.only_in, first.occurrence) == (None, 0)


def test_a_mean_over_the_rows_leaks_through_written_memory(runner_of):
    def mix(rows, inputs):
        out = torch.empty_like(rows)
        out.copy_(rows)
        out.add_(rows.mean(0))
        return out * 2

    assert places(with_pads(runner_of(mix))) == ("mean", "mix")


def test_an_operation_that_only_the_padded_run_has(runner_of):
    def mix(rows, inputs):
        rows = rows + 1
        if inputs.batch_size > 4:
            rows = rows.clamp(-1, 1)
        return rows * 2

    first = with_pads(runner_of(mix))
    assert (*places(first), first.only_in) == ("clamp", "mix", 1)


def test_an_operation_that_only_the_unpadded_run_has(runner_of):
    def mix(rows, inputs):
        if inputs.batch_size <= 4:
            rows = rows.clamp(-1, 1)
        return rows * 2

    first = with_pads(runner_of(mix))
    assert (*places(first), first.only_in) == ("clamp", "mix", 0)


def test_a_branch_without_effect_is_not_the_cause(runner_of):
    def mix(rows, inputs):
        rows = rows.double().float() if inputs.batch_size > 4 else rows + 0
        return rows + rows.mean(0)

    assert places(with_pads(runner_of(mix))) == ("mean", "mix")


def test_a_difference_within_rounding_is_found_if_there_is_no_larger_one(runner_of):
    def mix(rows, inputs):
        return rows * torch.full((), 1.0 + 2.0**-23 * (inputs.batch_size > 4))

    assert places(with_pads(runner_of(mix))) == ("full", "mix")


def test_the_second_of_equal_operations_is_counted(runner_of):
    def mix(rows, inputs):
        for factor in (0.0, 1.0):
            rows = rows + factor * rows.mean(0)
        return rows

    first = with_pads(runner_of(mix))
    assert (first.short_name, first.occurrence) == ("mean", 1)


@pytest.mark.parametrize(
    ("name", "mix"),
    [
        ("cumsum", lambda rows, inputs: rows.cumsum(0)),
        ("add", lambda rows, inputs: rows + torch.arange(len(rows))[:, None]),
        ("roll", lambda rows, inputs: rows.view(-1, WIDTH * HIDDEN).roll(1, 0).view_as(rows)),
    ],
)
def test_rows_that_depend_on_the_order(runner_of, name, mix):
    assert places(in_order(runner_of(mix), [1, 0, 2])) == (name, "<lambda>")


def test_the_first_node_that_differs_in_a_repeated_run(runner_of):
    counter = torch.zeros(())

    def mix(rows, inputs):
        rows = rows * 2
        counter.add_(1)
        return rows * counter

    runner = runner_of(mix)
    runs = (lambda: runner.fall_back(batch_of(2)),) * 2
    first = first_node(runner.step, runs, same_rows, Rounding(torch.float32))
    assert (first.short_name, first.occurrence) == ("mul", 0)
    assert first.origin.source.endswith("in mix")
    assert any(each is counter for each in first.outside)


def test_a_trace_follows_one_call_and_leaves_the_step_alone(runner_of):
    runner = runner_of(lambda rows, inputs: rows * 2)
    forward = runner.step.forward
    with traced(runner.step) as trace:
        runner.fall_back(batch_of(2))
        runner.fall_back(batch_of(2))
    assert runner.step.forward is forward
    assert [op.name for op in trace.ops] == ["aten::index.Tensor", "aten::mul.Tensor", "aten::mm"]
    assert [origin.op for origin in trace.origins] == [op.name for op in trace.ops]
    assert trace.outputs == {"next_token_logits": trace.ops[-1].writes[0]}
    with traced(runner.step, call=1) as trace:
        runner.fall_back(batch_of(2))
    assert trace.ops == []


def test_rows_are_at_the_front_of_a_dimension_that_ends_in_pads():
    units = RowPlaces([0, 1], [1, 0], 2, 2, may_have_pads=True)
    expected, got = torch.arange(5), torch.tensor([1, 0, 7, 8, 9])
    pairs = list(matched_rows(units)(expected, got))
    assert any(torch.equal(*pair) and pair[0].tolist() == [0, 1] for pair in pairs)
