"""Attention backends that cannot serve graphs of the extend modes: no graph, and said so."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from graphkit import AttentionBackend, AttentionError, ConfigError, ForwardMode, ReplayError
from graphkit.buffers import MultiLayerDraftExtendInputs
from graphkit.runners import (
    DraftExtendRunner,
    DraftExtendV2Runner,
    DraftRunner,
    MultiLayerEagleRunner,
    Reason,
)

WHY = "attention backend Picky does not support DRAFT_EXTEND_V2 graphs"
NEEDS_A_GRAPH = {
    "replay": lambda runner, batch: runner.replay(batch),
    "stage": lambda runner, batch: runner.stage(2),
    "observe": lambda runner, batch: runner.observe(lambda launch: launch()),
    "graphs": lambda runner, batch: runner.graphs,
}


class Picky(AttentionBackend):
    """Takes some modes, no width below 1, and notes what it is asked."""

    def __init__(self, *modes):
        self.modes, self.asked = modes, []

    def supports(self, mode):
        return mode in self.modes

    def init_state(self, sizes, max_tokens):
        self.asked.append(("init", sizes.max_batch_size, max_tokens))

    def metadata(self, mode, inputs):
        if inputs.tokens_per_request < 1:
            raise AttentionError("no rows per request")
        self.asked.append((mode, inputs.batch_size, inputs.tokens_per_request))
        return SimpleNamespace(width=inputs.tokens_per_request)


@pytest.fixture
def v2(extend_case, make_model):
    case = extend_case()
    return case.runner(DraftExtendV2Runner, make_model(), attention=Picky(), capture=False)


@pytest.fixture
def batch(extend_case):
    return extend_case().batch([2, 5], width=6)


def test_capture_makes_no_graph(v2):
    sizes = []
    record = v2.capture(progress=sizes.append)
    assert (record.modes[0].sizes, sizes) == ((), [])
    assert (record.modes[0].mode, record.modes[0].tokens_per_request) == ("DRAFT_EXTEND_V2", 6)
    assert v2.status == "planned"
    assert [asked[0] for asked in v2.attention.asked] == ["init"], "eager batches need it, too"


@pytest.mark.parametrize("captured", [False, True])
def test_run_falls_back_and_counts(v2, batch, extend_case, captured):
    if captured:
        v2.capture()
    rows = [row for request in extend_case().rows(batch) for row in request]
    for times in (1, 2):
        output = v2.run(batch)
        assert output.next_token_logits.tolist() == [logits for logits, _ in rows]
        assert v2.stats.fallbacks == {Reason.UNSUPPORTED_ATTENTION.value: times}
    assert v2.stats.replays == 0


def test_can_replay_says_why(v2, batch):
    v2.capture()
    decision = v2.can_replay(batch)
    assert (decision.ok, decision.kind) == (False, Reason.UNSUPPORTED_ATTENTION)
    assert (decision.reason, decision.padded_batch_size) == (WHY, None)


@pytest.mark.parametrize("verb", NEEDS_A_GRAPH)
def test_what_needs_a_graph_is_refused(v2, batch, verb):
    v2.capture()
    with pytest.raises(ReplayError, match=rf"{WHY}.*Use run\(batch\)"):
        NEEDS_A_GRAPH[verb](v2, batch)


def test_idle_batches_miss_nothing(v2, extend_case):
    v2.capture()
    output = v2.run(extend_case().batch([], width=6))
    assert output.next_token_logits.shape == (0, 31)
    assert v2.stats.fallbacks == {}


def test_closed_is_closed(v2, batch):
    v2.capture()
    v2.run(batch)
    v2.close()
    assert v2.can_replay(batch).kind is Reason.CLOSED
    for way in (v2.run, v2.replay):
        with pytest.raises(ReplayError, match="closed"):
            way(batch)
    with pytest.raises(ReplayError, match="closed"):
        v2.capture()
    assert v2.stats.fallbacks == {Reason.UNSUPPORTED_ATTENTION.value: 1}


@pytest.mark.parametrize("cls", [DraftExtendRunner, DraftRunner])
def test_other_modes_refuse_such_a_backend(extend_case, make_model, cls):
    with pytest.raises(ConfigError, match=f"Picky does not support {cls.mode.name}") as caught:
        extend_case().runner(cls, make_model(), attention=Picky(), capture=False)
    assert caught.value.field == "attention"


def test_a_chain_of_layers_asks_for_v2(extend_case, make_model):
    case = extend_case()
    layers = [make_model(layer) for layer in range(3)]
    runner = case.runner(MultiLayerEagleRunner, layers, attention=Picky())
    batch = case.batch([2, 5], width=6, cls=MultiLayerDraftExtendInputs)
    assert runner.can_replay(batch).reason == WHY
    assert runner.run(batch).topk_index.shape == (2, 3, 2)
    assert runner.stats.fallbacks == {Reason.UNSUPPORTED_ATTENTION.value: 1}
    taken = Picky(ForwardMode.DRAFT_EXTEND_V2)
    runner = case.runner(MultiLayerEagleRunner, layers, attention=taken)
    assert runner.replay(batch).topk_index.shape == (2, 3, 2)
    assert {asked[0] for asked in taken.asked[1:]} == {ForwardMode.DRAFT_EXTEND_V2}


@pytest.mark.parametrize(
    ("cls", "mode", "rows"),
    [
        (DraftExtendRunner, ForwardMode.DRAFT_EXTEND, None),
        (DraftExtendV2Runner, ForwardMode.DRAFT_EXTEND_V2, 6),
    ],
)
def test_no_batch_has_a_width_of_zero(extend_case, make_model, cls, mode, rows):
    """Not at a warm-up, nor at a capture, and an idle batch asks for no metadata."""
    case, attention = extend_case(), Picky(mode)
    runner = case.runner(cls, make_model(), attention=attention)
    width = 6 if rows else 4
    assert attention.asked[0] == ("init", 4, 4 * width)
    assert attention.asked[1:] == [(mode, size, width) for size in (4, 4, 2, 2, 1, 1)]
    for counts in ([], [1], [2, 3]):
        batch = case.batch(counts, width=rows)
        for way in (runner.replay, runner.run, runner.fall_back):
            assert torch.is_tensor(way(batch).next_token_logits)
