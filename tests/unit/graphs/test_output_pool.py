"""A replay overwrites the outputs of other graphs of its backend, as in a memory pool of CUDA."""

from __future__ import annotations

import gc

import pytest
import torch

import graphkit as gk
from graphkit.graphs import RecorderBackend

X = torch.arange(6.0)


@pytest.fixture
def backend():
    return RecorderBackend()


def test_a_replay_overwrites_the_outputs_of_other_graphs_but_not_its_own(backend):
    first, second = (backend.capture(lambda n=n: X + n) for n in (1, 2))
    first.replay()
    assert torch.equal(first.output, X + 1)
    assert second.output.isnan().all(), "the first one ran last"
    second.replay()
    assert torch.equal(second.output, X + 2)
    assert first.output.isnan().all()
    first.replay()
    assert torch.equal(first.output, X + 1)


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64,
     torch.float8_e4m3fn, torch.float8_e5m2],
)  # fmt: skip
def test_overwritten_floats_are_nan(backend, dtype):
    held = backend.capture(lambda: X.to(dtype).clone())
    backend.capture(lambda: X + 1).replay()
    wide = torch.complex64 if dtype.is_complex else torch.float64
    assert held.output.to(wide).isnan().all()


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.int64])
def test_overwritten_integers_are_out_of_range(backend, dtype):
    held = backend.capture(lambda: X.to(dtype).clone())
    backend.capture(lambda: X + 1).replay()
    assert (held.output < -100).all()


def test_overwritten_booleans_are_the_opposite(backend):
    held = backend.capture(lambda: X > 2)
    for _ in range(2):  # the second replay finds it overwritten
        backend.capture(lambda: X + 1).replay()
        assert torch.equal(held.output, X <= 2)


def test_all_outputs_are_overwritten_and_views_in_their_memory(backend):
    made = backend.capture(lambda: {"a": (X + 1).expand(3, 6), "b": [(X + 2)[2:4], X > 1], "c": 3})
    backend.capture(lambda: X + 1).replay()
    assert made.output["a"].isnan().all()
    assert made.output["b"][0].isnan().all()
    assert torch.equal(made.output["b"][1], X <= 1)


def test_memory_that_no_capture_allocated_stays(backend):
    state, x = torch.zeros(6), X.clone()

    def step():
        state.add_(x)
        return state, x.view(2, 3), torch.zeros(2, device="cpu")

    graph = backend.capture(step)
    backend.capture(lambda: X + 1).replay()
    assert torch.equal(graph.output[0], X)
    assert torch.equal(graph.output[1].flatten(), X)
    assert not graph.output[2].any(), "memory of the host"


def test_backends_have_separate_pools(backend):
    first = backend.capture(lambda: X + 1)
    RecorderBackend().capture(lambda: X + 2).replay()
    assert torch.equal(first.output, X + 1)


def test_graphs_read_what_earlier_graphs_made(backend):
    """Memory that a later capture reads stays allocated."""
    made, graphs = [], []
    x = X.clone()
    with backend.session():
        graphs.append(backend.capture(lambda: made.append(x + 1)))
        graphs.append(backend.capture(lambda: made.append(made[0] * 2)))
        graphs.append(backend.capture(lambda: made[0] + made[1]))
    last, other = graphs[-1], backend.capture(lambda: X + 9)
    for number in range(3):
        x.fill_(number)
        for graph in graphs:
            graph.replay()
        assert last.output.tolist() == [3 * (number + 1)] * 6
        other.replay()
        assert last.output.isnan().all()


def test_a_capture_session_overwrites_older_outputs_alone(backend):
    older = backend.capture(lambda: X + 1)
    with backend.session():
        first = backend.capture(lambda: X + 2)
        assert older.output.isnan().all()
        backend.capture(lambda: X + 3)
        assert torch.equal(first.output, X + 2)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_outputs_of_captures_without_gradients_are_overwritten(backend, mode):
    with mode(), backend.session():
        held = backend.capture(lambda: X + 1)
    with backend.session():
        graph = backend.capture(lambda: X + 2)
    assert held.output.isnan().all()
    held.replay()
    assert torch.equal(held.output, X + 1)
    graph.replay()
    assert held.output.isnan().all()


def test_a_session_without_captures_overwrites_nothing(backend):
    graph = backend.capture(lambda: X + 1)
    with backend.session():
        backend.warm_up(lambda: X + 2)
    assert torch.equal(graph.output, X + 1)


def test_closed_and_dropped_graphs_are_released(backend):
    closed, dropped = (backend.capture(lambda: X + 1) for _ in range(2))
    output = closed.output
    closed.close()
    del dropped
    gc.collect()
    kept = backend.capture(lambda: X + 1)
    kept.replay()
    assert len(backend._pool._outputs) == 1
    assert torch.equal(output, X + 1)


SPEC = gk.SpecConfig("EAGLE", num_steps=3, topk=1, num_draft_tokens=4)
WIDTH = SPEC.num_draft_tokens
SIZES = gk.BufferSizes(4, 32, 8, 16, torch.float32)


def forward(inputs):
    hidden = inputs.input_ids[:, None] * torch.ones(8, device=inputs.input_ids.device)
    return gk.ForwardOutput(next_token_logits=hidden.repeat(1, 2), hidden_states=hidden)


def batch(count, first=1):
    rows = torch.arange(count * WIDTH)
    return gk.TargetVerifyInputs(
        req_pool_indices=torch.arange(1, count + 1),
        seq_lens=torch.full((count,), 5, dtype=torch.int32),
        input_ids=rows % 8 + first,
        positions=5 + rows % WIDTH,
        out_cache_loc=1 + rows,
    )


@pytest.fixture
def runners():
    made = [
        gk.TargetVerifyRunner(
            forward, spec=SPEC, sizes=SIZES, batch_sizes=[2, 4], device="cpu", **options
        )
        for options in ({}, {}, {"backend": RecorderBackend()})
    ]
    for runner in made:
        runner.capture()
    yield made
    for runner in made:
        runner.close()


def test_a_replay_of_another_size_overwrites_an_output(runners):
    held = runners[0].replay(batch(2))
    expected = held.clone()
    assert torch.equal(held.hidden_states, expected.hidden_states)
    runners[0].replay(batch(3))
    assert held.hidden_states.isnan().all()
    assert held.next_token_logits.isnan().all()
    assert not expected.hidden_states.isnan().any()


def test_runners_of_the_device_share_a_pool_by_default(runners):
    held = runners[0].replay(batch(2))
    runners[2].replay(batch(2))
    assert not held.hidden_states.isnan().any(), "it has its own backend"
    runners[0].stage(2)
    runners[0].run_padded(batch(3))
    assert not held.hidden_states.isnan().any(), "nothing was replayed"
    runners[1].replay(batch(2))
    assert held.hidden_states.isnan().all()


def test_a_replay_reads_the_output_of_another_graph_before_it_is_overwritten(runners):
    """The refresh copies inputs that are device tensors at the start of the graph."""
    options = {"spec": SPEC, "sizes": SIZES, "batch_sizes": [2], "device": "cpu"}
    drafter = gk.DraftExtendV2Runner(
        lambda inputs: gk.ForwardOutput(
            next_token_logits=inputs.hidden_states.repeat(1, 2), hidden_states=inputs.hidden_states
        ),
        **{**options, "spec": gk.SpecConfig("EAGLE", 3, 1, 4, is_draft_worker=True)},
    )
    with drafter:
        drafter.capture()
        counts = torch.full((2,), 1, dtype=torch.int32)
        for first in (1, 3):
            verified = runners[0].replay(batch(2, first))
            expected = verified.hidden_states.clone()
            live = batch(2, first)
            extended = drafter.replay(
                gk.DraftExtendInputs(
                    req_pool_indices=live.req_pool_indices,
                    seq_lens=live.seq_lens,
                    extend_seq_lens=counts * WIDTH,
                    input_ids=live.input_ids,
                    positions=live.positions,
                    out_cache_loc=live.out_cache_loc,
                    hidden_states=verified.hidden_states,
                    num_accepted_drafts=counts - 1,
                    num_accepted_tokens=counts,
                )
            )
            assert torch.equal(extended.hidden_states, expected)
            assert verified.hidden_states.isnan().all()
