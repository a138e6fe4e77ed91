"""Chains that cannot be built, captured or run, and the operations of their graphs."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from graphkit import (
    AttentionBackend,
    CaptureCause,
    CaptureError,
    ConfigError,
    ForwardOutput,
    InputError,
    OutputError,
    RecorderBackend,
    ReplayError,
)
from graphkit.buffers import MultiLayerDraftExtendInputs
from graphkit.runners import MultiLayerEagleRunner, Reason


class Noting(RecorderBackend):
    """Keeps the graphs that it made."""

    def __init__(self):
        super().__init__()
        self.made = []

    def capture(self, function, attribution=None):
        self.made.append(super().capture(function, attribution))
        return self.made[-1]


@pytest.fixture
def case(extend_case):
    return extend_case()


@pytest.fixture
def layers(make_model):
    return [make_model(layer) for layer in range(3)]


@pytest.fixture
def batch(case):
    return case.batch([3, 1], width=6, cls=MultiLayerDraftExtendInputs)


@pytest.mark.parametrize("count", [0, 1, 2, 4])
def test_one_forward_per_step(case, make_model, count):
    forwards = [make_model() for _ in range(count)]
    with pytest.raises(ConfigError, match=f"got {count} forwards for num_steps 3") as caught:
        case.runner(MultiLayerEagleRunner, forwards, capture=False)
    assert caught.value.field == "forward"


@pytest.mark.parametrize("forward", [lambda inputs: inputs, None], ids=["one", "none"])
def test_what_is_no_list_is_refused(case, forward):
    with pytest.raises(ConfigError, match="list with one forward per step") as caught:
        case.runner(MultiLayerEagleRunner, forward, capture=False)
    assert caught.value.field == "forward"


def test_layers_may_be_modules(case, layers, batch):
    class Layer(torch.nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def forward(self, inputs):
            return self.model(inputs)

    modules = torch.nn.ModuleList(map(Layer, layers))
    expected = case.runner(MultiLayerEagleRunner, layers).replay(batch, clone=True)
    got = case.runner(MultiLayerEagleRunner, modules).replay(batch)
    assert torch.equal(got.topk_index, expected.topk_index)


@pytest.mark.parametrize("front", [-1, 1.5, True, None])
def test_front_tokens_are_a_count(case, layers, front):
    with pytest.raises(ConfigError, match="num_front_tokens") as caught:
        case.runner(MultiLayerEagleRunner, layers, num_front_tokens=front, capture=False)
    assert caught.value.field == "num_front_tokens"


@pytest.mark.parametrize("hidden", ["nothing", "request"])
@pytest.mark.parametrize("forgetful", [0, 1])
def test_a_layer_that_forgets_hidden_states_is_refused(case, make_model, batch, hidden, forgetful):
    """The next one reads a row for each of its own."""
    layers = [make_model(i, hidden=hidden if i == forgetful else "token") for i in range(3)]
    runner = case.runner(MultiLayerEagleRunner, layers, capture=False)
    text = f"layer {forgetful} returned no hidden state for each of its"
    with pytest.raises(OutputError, match=text):
        runner.fall_back(batch)
    with pytest.raises(CaptureError, match=text):
        runner.capture()
    assert runner.status == "planned"


@pytest.mark.parametrize("hidden", ["nothing", "request"])
def test_nobody_reads_those_of_the_last_layer(case, make_model, batch, hidden):
    layers = [make_model(i, hidden=hidden if i == 2 else "token") for i in range(3)]
    runner = case.runner(MultiLayerEagleRunner, layers)
    output = runner.replay(batch)
    assert output.topk_index.shape == (2, 3, 2)
    assert (output.hidden_states is None) == (hidden == "nothing")
    assert torch.equal(runner.fall_back(batch).topk_index, output.topk_index)


@pytest.mark.parametrize("rows", [1, 13])
def test_rows_that_nobody_asked_for(case, layers, batch, rows):
    def forward(inputs):
        logits = layers[1](inputs).next_token_logits
        return ForwardOutput(next_token_logits=logits[:1].repeat(rows, 1))

    runner = case.runner(MultiLayerEagleRunner, [layers[0], forward, layers[2]], capture=False)
    with pytest.raises(
        OutputError, match=f"{rows} rows of next_token_logits for 12 tokens or 2 req"
    ):
        runner.fall_back(batch)


def test_a_size_counts_the_nodes_of_its_graph(case, layers):
    backend, records = Noting(), []
    runner = case.runner(MultiLayerEagleRunner, layers, backend=backend, capture=False)
    record = runner.capture(progress=records.append)
    assert len(backend.made) == len(records) == 3
    for graph, size in zip(backend.made, records, strict=True):
        assert size.num_nodes == len(graph.ops) > 0
        assert size.pool_bytes == graph.pool_bytes
    assert sorted(records, key=lambda size: size.batch_size) == list(record.modes[0].sizes)
    assert record.modes[0].mode == "MULTI_LAYER_EAGLE"
    runner.close()
    assert all(graph.ops == () for graph in backend.made)


@pytest.mark.parametrize("at", [1, 2], ids=["second", "last"])
@pytest.mark.parametrize("when", ["first size", "smallest size"])
def test_a_layer_that_fails_leaves_no_trace(case, layers, batch, assert_in_step, at, when):
    """Graphs of larger sizes are closed; state is as it was."""
    steps, failing = torch.zeros(1), [True]

    def counting(inputs):
        steps.add_(1)
        return layers[0](inputs)

    def forward(inputs):
        if failing[0] and inputs.batch_size == (4 if when == "first size" else 1):
            inputs.input_ids.sum().item()
        return layers[at](inputs)

    chain = [counting, *layers[1:]]
    chain[at] = forward
    backend = Noting()
    runner = case.runner(
        MultiLayerEagleRunner, chain, backend=backend, mutable_state={"steps": steps}, capture=False
    )
    with pytest.raises(CaptureError, match="MULTI_LAYER_EAGLE") as caught:
        runner.capture()
    assert caught.value.cause is CaptureCause.HOST_SYNCHRONISATION
    assert caught.value.batch_size == (4 if when == "first size" else 1)
    assert len(backend.made) == (0 if when == "first size" else 2)
    assert all(graph.ops == () for graph in backend.made)
    assert (runner.status, steps.item()) == ("planned", 0)
    assert_in_step(runner)
    failing[0] = False
    runner.capture()
    expected = runner.fall_back(batch)
    assert torch.equal(runner.replay(batch).topk_index, expected.topk_index)
    assert steps.item() == 2
    assert_in_step(runner)


def test_a_replay_that_fails_in_its_chain_loses_nothing(case, layers, batch, assert_in_step):
    """An entry that the refresh consumed stays consumed if a layer fails."""
    table = torch.arange(64)

    def forward(inputs):
        return layers[1](inputs), torch.nn.functional.embedding(inputs.positions, table[:, None])

    chain = [layers[0], lambda inputs: forward(inputs)[0], layers[2]]
    runner = case.runner(MultiLayerEagleRunner, chain)
    expected = runner.replay(batch, clone=True)
    for _ in range(5):
        bad = case.batch(
            [3, 1], width=6, cls=MultiLayerDraftExtendInputs, positions=np.full(12, 99)
        )
        with pytest.raises(ReplayError, match="raised IndexError"):
            runner.replay(bad)
        assert torch.equal(runner.replay(batch).topk_index, expected.topk_index)
        assert_in_step(runner)
    assert runner.stats.replays == 6


def test_metadata_is_made_once_for_all_layers(case, layers, batch):
    class Spy(AttentionBackend):
        made = 0

        def supports(self, mode):
            return mode.is_draft_extend_v2()

        def init_state(self, sizes, max_tokens):
            assert max_tokens == 24

        def metadata(self, mode, inputs):
            self.made += 1
            return SimpleNamespace(lengths=inputs.seq_lens + 0)

    attention = Spy()
    runner = case.runner(MultiLayerEagleRunner, layers, attention=attention, capture=False)
    runner.fall_back(batch)
    assert attention.made == 1
    assert len({id(model.seen[-1].attention) for model in layers}) == 1
    assert layers[2].seen[-1].attention.lengths.tolist() == batch.seq_lens.tolist()


def test_temperatures_must_be_asked_for(case, layers):
    runner = case.runner(MultiLayerEagleRunner, layers)
    over = {"cls": MultiLayerDraftExtendInputs, "temperatures": np.ones(2, np.float32)}
    hot = case.batch([3, 1], width=6, **over)
    assert runner.can_replay(hot).kind is Reason.FIELD_NOT_CAPTURED
    with pytest.raises(InputError, match=r"'temperatures'.*optional_fields=\['temperatures'\]"):
        runner.replay(hot)


@pytest.mark.parametrize("life", ["planned", "captured"])
def test_idle_batches_have_a_layer_dimension(case, layers, life):
    runner = case.runner(MultiLayerEagleRunner, layers, capture=life == "captured")
    output = runner.run(case.batch([], width=6, cls=MultiLayerDraftExtendInputs))
    assert {name: tuple(rows.shape) for name, rows in output.tensors().items()} == {
        "next_token_logits": (0, 3, 31),
        "hidden_states": (0, 3, 4),
        "topk_p": (0, 3, 2),
        "topk_index": (0, 3, 2),
    }


def test_the_record_names_the_layers(case, layers):
    record = case.runner(MultiLayerEagleRunner, layers, capture=False).capture()
    assert "ExtendModel" in record.target


@pytest.mark.parametrize("front", [0, 2])
@pytest.mark.parametrize("check", [False, True])
def test_a_select_index_that_contradicts_the_counts_is_refused(case, layers, front, check):
    runner = case.runner(MultiLayerEagleRunner, layers, num_front_tokens=front, check=check)
    width = runner.tokens_per_request
    slots = 1 + np.arange(2 * width)
    batch = case.batch([3, 1], width=width, cls=MultiLayerDraftExtendInputs, out_cache_loc=slots)
    right = np.arange(2) * width + front + np.array([2, 0])
    runner.replay(replace(batch, select_index=right))
    for wrong in (right + np.arange(2), right - [1, 0], torch.from_numpy(right + 1)):
        for run in (runner.replay, runner.run_padded):
            with pytest.raises(InputError, match=r"select_index is .* end in rows") as caught:
                run(replace(batch, select_index=wrong))
            assert caught.value.field == "select_index"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("select_index", np.int64(3)),
        ("extend_seq_lens", np.zeros(0, np.int32)),
        ("extend_seq_lens", np.array([6, 0], np.int32)),
    ],
)
def test_fields_of_wrong_shapes_and_lengths_are_refused_by_name(case, layers, batch, field, value):
    runner = case.runner(MultiLayerEagleRunner, layers)
    for run in (runner.replay, runner.run_padded, runner.fall_back):
        with pytest.raises(InputError, match=field) as caught:
            run(replace(batch, **{field: value}))
        assert caught.value.field == field
