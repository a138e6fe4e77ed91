"""A chain of draft layers over one window per request, against the windows turned by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from graphkit.buffers import MultiLayerDraftExtendInputs
from graphkit.ops import rotate_input_ids
from graphkit.runners import DraftExtendOutput, MultiLayerEagleRunner, Reason

SETTINGS = [("EAGLE", 4, 1, 5), ("EAGLE", 3, 2, 6), ("EAGLE", 1, 3, 4)]


@pytest.fixture(scope="session")
def chain(extend_case, make_model):
    """``chain(settings, front=, logits=, **options)``: a case, its layers, and a runner."""

    def make(settings=("EAGLE", 3, 2, 6), front=0, logits="token", **options):
        case = extend_case(*settings, front=front)
        layers = [make_model(layer, logits) for layer in range(settings[1])]
        runner = case.runner(MultiLayerEagleRunner, layers, num_front_tokens=front, **options)
        return case, layers, runner

    return make


def windows(case, counts, front=0, **over):
    width = case.spec.num_draft_tokens + front
    return case.batch(counts, width=width, cls=MultiLayerDraftExtendInputs, **over)


@pytest.fixture(scope="session")
def by_layer(by_hand):
    """``by_layer(case, batch, request)``: (window, logits, hidden, p, tokens) of each layer."""

    def run(case, batch, request):
        width = batch.num_tokens // batch.batch_size
        rows = list(range(request * width, (request + 1) * width))
        select = int(batch.select_index[request]) - rows[0]
        heat = 1.0 if batch.temperatures is None else float(batch.temperatures[request])
        ids = [int(i) for i in batch.input_ids[rows]]
        hidden = batch.hidden_states[rows].int().tolist()
        for layer in range(case.spec.num_steps):
            made = by_hand.rows(batch, request, rows, ids, hidden, layer)
            logits, hidden = made[select][0], [after for _, after in made]
            p, tokens = by_hand.top([x / heat for x in logits], case.spec.topk)
            yield ids, logits, hidden[select], p, tokens
            ids = ids[1:] + ids[-1:]
            ids[select] = tokens[0]

    return run


@pytest.fixture(scope="session")
def check(by_layer):
    def check(case, output, batch):
        assert isinstance(output, DraftExtendOutput)
        shape = batch.batch_size, case.spec.num_steps, case.spec.topk
        assert output.topk_p.shape == output.topk_index.shape == shape
        for request in range(batch.batch_size):
            _, logits, hidden, p, tokens = zip(*by_layer(case, batch, request), strict=True)
            assert output.next_token_logits[request].tolist() == list(logits)
            assert output.hidden_states[request].tolist() == list(hidden)
            assert output.topk_index[request].tolist() == list(tokens)
            for got, expected in zip(output.topk_p[request].tolist(), p, strict=True):
                assert got == pytest.approx(expected, rel=1e-6)

    return check


@pytest.mark.parametrize("logits", ["token", "request"], ids=["every row", "pruned"])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_every_way_turns_the_windows(
    chain, poison, check, assert_in_step, settings, logits, assert_same
):
    """Also in buffers full of garbage, and at every size that holds the batch."""
    case, layers, runner = chain(settings, logits=logits)
    rng = np.random.default_rng(0)
    for seed, requests in enumerate([3, 1]):
        batch = windows(case, rng.integers(1, settings[1] + 2, requests), seed=seed)
        poison(runner)
        calls = layers[-1].calls
        output = runner.replay(batch, clone=True)
        assert_same(runner.replay(batch, padded_batch_size=4), output)
        assert layers[-1].calls == calls, "Python ran again"
        check(case, output, batch)
        assert_same(runner.run_padded(batch), output)
        assert_same(runner.fall_back(batch), output)
    assert_in_step(runner)


@pytest.mark.parametrize("way", ["padded", "fall_back"])
def test_each_layer_sees_its_window(chain, by_layer, way):
    case, layers, runner = chain()
    batch = windows(case, [3, 1, 4], seed=4)
    if way == "padded":
        runner.run_padded(batch)
    else:
        runner.fall_back(batch)
    due = [list(by_layer(case, batch, request)) for request in range(3)]
    for layer, model in enumerate(layers):
        inputs = model.seen[-1]
        expected = [token for request in due for token in request[layer][0]]
        assert inputs.input_ids[:18].tolist() == expected
        assert torch.equal(inputs.positions[:18], torch.from_numpy(batch.positions))
        assert torch.equal(inputs.out_cache_loc[:18], torch.from_numpy(batch.out_cache_loc))
        assert inputs.seq_lens[:3].tolist() == batch.seq_lens.tolist()
        assert inputs.select_index[:3].tolist() == batch.select_index.tolist()


def test_pads_touch_no_live_row(chain, check):
    """A pad's select_index is 0, the first live request's row; the pads come after it."""
    case, layers, runner = chain(batch_sizes=[4])
    batch = windows(case, [1], seed=2)
    assert batch.select_index.tolist() == [0]
    check(case, runner.replay(batch), batch)
    runner.run_padded(batch)
    assert runner.buffers.view(4).select_index.tolist() == [0, 0, 0, 0]
    for model in layers:  # what selects by it in the forward stays in its own rows, too
        assert model.seen[-1].select_index.tolist() == [0, 6, 12, 18]
    first, last = layers[0].seen[-1].input_ids, layers[2].seen[-1].input_ids
    assert first[6:].eq(0).all()
    assert last[:6].tolist()[1:5] == first[:6].tolist()[3:] + first[:6].tolist()[-1:]


def test_a_request_selects_among_its_own_rows_alone(chain, monkeypatch, assert_same):
    """Inside the graph too: the host cannot check the values of a device tensor."""
    monkeypatch.setattr(MultiLayerDraftExtendInputs, "check", classmethod(lambda *_: None))
    case, _, runner = chain()
    outside = windows(case, [3, 1, 4], select_index=np.array([999, -5, 15]))
    inside = windows(case, [3, 1, 4], select_index=np.array([5, 6, 15]))
    assert_same(runner.replay(outside, clone=True), runner.replay(inside))


def test_a_chain_leaves_its_inputs_as_it_found_them(chain, poison):
    case, _, runner = chain()
    for kind in (np.asarray, torch.from_numpy):
        batch = windows(case, [3, 1, 4], kind=kind)
        before = {
            n: torch.as_tensor(rows).clone() for n, rows in vars(batch).items() if rows is not None
        }
        for turn in range(2):
            poison(runner)
            runner.replay(batch)
            runner.fall_back(batch)
            for name, rows in before.items():
                held = getattr(runner.buffers.view(4), name)
                assert torch.equal(held[: len(rows)], rows.to(held.dtype)), (turn, name)
                assert torch.equal(torch.as_tensor(getattr(batch, name)), rows), name


def test_pads_of_the_buffers(chain, poison):
    case, _, runner = chain(front=2, optional_fields=["temperatures"])
    assert runner.tokens_per_request == 8
    poison(runner)
    batch = windows(case, [3, 1], front=2, temperatures=np.full(2, 0.5, np.float32))
    runner.replay(batch, padded_batch_size=4)
    pads = {
        "req_pool_indices": 0, "seq_lens": 1, "extend_seq_lens": 8, "num_accepted_drafts": 0,
        "num_accepted_tokens": 1, "select_index": 0, "temperatures": 1,
    }  # fmt: skip
    view = runner.buffers.view(4)
    assert {name: getattr(view, name)[2:].tolist() for name in pads} == {
        name: [pad] * 2 for name, pad in pads.items()
    }


@pytest.mark.parametrize("front", [1, 3])
def test_front_tokens_widen_the_windows(chain, check, front):
    case, _, runner = chain(front=front)
    assert runner.tokens_per_request == 6 + front
    batch = windows(case, [4, 1, 2], front)
    assert batch.select_index.tolist() == [
        i * (6 + front) + front + count - 1 for i, count in enumerate([4, 1, 2])
    ]
    for way in (runner.replay, runner.fall_back):
        check(case, way(batch), batch)


@pytest.mark.parametrize("topk", [1, 2])
def test_temperatures_divide_before_top_k(chain, check, topk):
    settings = ("EAGLE", 3, topk, 4)
    case, _, runner = chain(settings, optional_fields=["temperatures"])
    heat = np.array([0.5, 1.0, 4.0], np.float32)
    batch = windows(case, [4, 1, 2], temperatures=heat)
    for way in (runner.replay, runner.fall_back):
        check(case, way(batch), batch)
    plain = chain(settings)[2].replay(windows(case, [4, 1, 2]), clone=True)
    got = runner.replay(batch)
    assert torch.equal(got.topk_index, plain.topk_index)
    assert torch.equal(got.next_token_logits, plain.next_token_logits)
    assert (got.topk_p[0, :, 0] > plain.topk_p[0, :, 0]).all()
    assert (got.topk_p[2, :, 0] < plain.topk_p[2, :, 0]).all()


@pytest.mark.parametrize("width", [4, 9])
def test_windows_of_another_width_fall_back(chain, check, width):
    """As where some requests were verified at another width, or at a prompt."""
    case, _, runner = chain()
    batch = case.batch([3, 1, 4], width=width, cls=MultiLayerDraftExtendInputs)
    assert runner.can_replay(batch).kind is Reason.WRONG_WIDTH
    check(case, runner.run(batch), batch)
    assert runner.stats.fallbacks == {"wrong width": 1}


def test_a_staged_batch_is_a_batch(chain, check, stage):
    case, _, runner = chain()
    for seed in range(6):
        batch = windows(case, [3, 1, 4], seed=seed)
        check(case, stage(runner, batch).replay(), batch)


def test_the_turn_is_that_of_the_op(chain):
    """The windows by hand and ``rotate_input_ids`` mean the same."""
    ids = torch.arange(12)
    rotate_input_ids(ids, torch.tensor([0, 6]).int(), torch.tensor([6, 6]).int(),
                     torch.tensor([[90, 1], [91, 2]]), torch.tensor([2, 11]))  # fmt: skip
    assert ids.tolist() == [1, 2, 90, 4, 5, 5, 7, 8, 9, 10, 11, 91]
