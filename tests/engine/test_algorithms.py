"""Custom algorithms, and drafters that do not match the width of verify."""

from __future__ import annotations

import runpy
from dataclasses import replace
from pathlib import Path

import pytest

from engine_runs import each_generation, outputs, refuses
from graphkit.engine import (
    EagleDrafter,
    EngineModel,
    MultiLayerDrafter,
    NgramDrafter,
    SamplingParams,
)
from graphkit.errors import CaptureError, ConfigError, OutputError
from graphkit.spec import CustomSpecAlgorithm, FutureMap, SpecAlgorithm
from small_llama import StandaloneForward

REQUESTS = 20
EXAMPLE = Path(__file__).parents[2] / "tools" / "examples" / "custom_algorithm.py"


@pytest.fixture(scope="session")
def example():
    """The module of the example."""
    return runpy.run_path(str(EXAMPLE))


@pytest.mark.slow
@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
@each_generation
def test_a_custom_algorithm_is_lossless(
    make_engine, task, example, run_in_waves, generation, captured
):
    task = task.first(REQUESTS)
    drafter, algorithm = example["CopyDrafter"](), example["CopyAlgorithm"]("COPYING")
    engine = make_engine(
        algorithm, drafter=lambda _: drafter, num_draft_tokens=5, generation=generation
    )
    assert drafter.width == 6
    if captured:
        engine.capture()
    requests = run_in_waves(engine, task)
    assert outputs(requests) == task.expected
    assert isinstance(drafter.future_map, example["CountingFutureMap"])
    steps = drafter.future_map.steps
    # In v1 the drafter does not see the last steps, with which all requests of a batch end.
    assert steps.sum() >= engine.stats.num_verifies - (generation == "v1") * len(requests)
    assert steps[1:].sum() > 0, "some drafts were accepted"


class Wider(CustomSpecAlgorithm):
    """Verifies one row more than num_draft_tokens, and records its future map's arguments."""

    def get_num_tokens_per_bs_for_target_verify(self, num_draft_tokens, is_draft_worker):
        return num_draft_tokens + 1

    def create_future_map(self, *args):
        self.future_map_args = args
        return FutureMap(*args, self)


@pytest.mark.parametrize("topk", [1, 2], ids=["chain", "tree"])
def test_an_algorithm_says_the_width_and_makes_the_future_map(make_engine, task, topk):
    algorithm = Wider("WIDER")
    engine = make_engine(
        algorithm,
        topk=topk,
        drafter=lambda _: NgramDrafter(),
        chunked_prefill_size=64,
        max_batch_size=5,
        generation="v2",
    )
    assert algorithm.future_map_args == (7, 64, engine.sizes.max_context_len, engine.device)
    assert engine.runners[0].tokens_per_request == engine.spec.num_draft_tokens + 1
    engine.capture()
    requests = engine.generate(task.prompts[:6], SamplingParams(max_new_tokens=6))
    assert outputs(requests) == [t[:6] for t in task.expected[:6]]


class OfWidth(CustomSpecAlgorithm):
    """Verifies ``width`` rows; a predicate named ``kind`` is true."""

    def __init__(self, width, kind="is_eagle"):
        super().__init__("OF_WIDTH")
        self.width, self.kind = width, kind

    def get_num_tokens_per_bs_for_target_verify(self, num_draft_tokens, is_draft_worker):
        return self.width

    def is_eagle(self):
        return self.kind == "is_eagle"

    def is_standalone(self):
        return self.kind == "is_standalone"


@pytest.mark.slow
@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
@each_generation
@pytest.mark.parametrize("kind", ["is_eagle", "is_standalone", "none of both"])
@pytest.mark.parametrize("width", [5, 8])
def test_a_chain_may_be_shorter_than_verify(
    make_engine, task, run_in_waves, generation, captured, kind, width
):
    """Its accepted lengths are those of a verify that it fills."""
    task = task.first(REQUESTS)
    lengths = []
    for each in (4, width):
        engine = make_engine(OfWidth(each, kind), generation=generation, batch_sizes=[8])
        assert engine.runners[0].tokens_per_request == (1 if generation == "v3" else each)
        if captured:
            engine.capture()
        requests = run_in_waves(engine, task)
        assert outputs(requests) == task.expected
        lengths.append([request.accepted_lengths for request in requests])
    assert lengths[0] == lengths[1]
    assert max(max(counts, default=0) for counts in lengths[1]) == 4, "whole chains are accepted"


@pytest.mark.slow
@pytest.mark.parametrize("page_size", [1, 4])
@each_generation
@pytest.mark.parametrize(("drafts", "width"), [(4, 6), (3, 6), (2, 3)])
def test_layers_may_draft_less_than_verify(make_engine, task, generation, drafts, width, page_size):
    engine = make_engine(
        OfWidth(width, "none of both"),
        layers=3,
        num_draft_tokens=drafts,
        page_size=page_size,
        generation=generation,
        batch_sizes=[8],
    )
    engine.capture()
    requests = engine.generate(task.prompts[:8], SamplingParams(max_new_tokens=9))
    assert outputs(requests) == [t[:9] for t in task.expected[:8]]
    assert max(engine.stats.accepted_lengths) == drafts


@each_generation
@pytest.mark.parametrize(("topk", "width"), [(1, 3), (2, 9), (2, 7)])
@pytest.mark.parametrize("kind", [EagleDrafter, MultiLayerDrafter])
def test_other_widths_are_refused_by_the_constructor(make_engine, generation, topk, width, kind):
    algorithm = OfWidth(width, "none of both")
    message = rf"verifies {width} rows per request, but {kind.__name__} drafts \d nodes.*to {width}"
    with refuses(ConfigError, "num_draft_tokens", message):
        make_engine(
            algorithm,
            drafter=kind,
            topk=topk,
            generation=generation,
            layers=3 if kind is MultiLayerDrafter else None,
        )


@pytest.mark.parametrize("kind", [EagleDrafter, MultiLayerDrafter])
@pytest.mark.parametrize(("topk", "nodes", "most"), [(1, 5, 4), (2, 12, 11)])
def test_nodes_that_no_draft_step_creates_are_refused(make_engine, kind, topk, nodes, most):
    with pytest.raises(
        ConfigError, match=rf"num_draft_tokens is {nodes}, but .* at most .* = {most}"
    ):
        make_engine(
            CustomSpecAlgorithm("MINE"),
            drafter=kind,
            topk=topk,
            num_draft_tokens=nodes,
            layers=3 if kind is MultiLayerDrafter else None,
        )


@each_generation
@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("algorithm", ["EAGLE", "MULTI_LAYER_EAGLE"])
def test_a_target_without_the_hidden_states_that_drafters_read(
    make_engine, labelling_forward, task, generation, captured, algorithm
):
    def without_hidden_states(model, attention):
        forward = labelling_forward(model, attention)
        return lambda inputs: replace(forward(inputs), hidden_states=None)

    engine = make_engine(algorithm, generation=generation, target=without_hidden_states)
    message = "the target's forward returned no hidden_states, but the draft model of .*Drafter"
    with pytest.raises(CaptureError if captured else OutputError, match=message):
        engine.capture() if captured else engine.generate(task.prompts[:1])
    assert not engine.has_work


class Plain(CustomSpecAlgorithm):
    """Plain decoding by another name."""

    def is_none(self):
        return True


@each_generation
def test_plain_decoding_verifies_one_row(make_engine, generation):
    with refuses(ConfigError, "num_draft_tokens", r"is_none\(\) is True: .* verify has 4 rows"):
        make_engine(Plain("PLAIN"), generation=generation)


@each_generation
def test_plain_decoding_has_no_draft_model(make_engine, generation):
    with pytest.raises(ConfigError, match=r"is_none\(\) is True: .* no drafts of EagleDrafter"):
        make_engine(Plain("PLAIN"), num_draft_tokens=1, generation=generation)


@each_generation
def test_a_language_model_drafts_for_standalone_alone(make_engine, task, model, generation):
    def drafter(engine_model):
        forward = StandaloneForward(model, engine_model.attention)
        return EagleDrafter(EngineModel(forward, engine_model.attention))

    engine = make_engine(CustomSpecAlgorithm("MINE"), drafter=drafter, generation=generation)
    with pytest.raises(OutputError, match=r"returned no hidden_states, .* or use STANDALONE"):
        engine.generate(task.prompts[:1])


@each_generation
@pytest.mark.parametrize("algorithm", [SpecAlgorithm.EAGLE, SpecAlgorithm.NONE])
def test_no_drafter_needs_a_verify_of_one_row(make_engine, task, generation, algorithm):
    with pytest.raises(ConfigError, match="num_draft_tokens"):
        make_engine(algorithm, drafter=lambda _: None, generation=generation)
