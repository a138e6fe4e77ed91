"""Custom algorithms, and drafters that do not match the width of verify."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from graphkit.engine import NgramDrafter, SamplingParams
from graphkit.errors import ConfigError, GraphkitError
from graphkit.spec import CustomSpecAlgorithm, FutureMap, SpecAlgorithm

REQUESTS = 20
EXAMPLE = Path(__file__).parents[2] / "tools" / "examples" / "custom_algorithm.py"
each_generation = pytest.mark.parametrize("generation", ["v1", "v2", "v3"])


@pytest.fixture(scope="session")
def example():
    """The module of the example."""
    return runpy.run_path(str(EXAMPLE))


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
    assert [request.output_ids for request in requests] == task.expected
    assert isinstance(drafter.future_map, example["CountingFutureMap"])
    steps = drafter.future_map.steps
    assert steps.sum() >= engine.stats.num_verifies
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
    assert [request.output_ids for request in requests] == [t[:6] for t in task.expected[:6]]


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
@each_generation
def test_a_tree_of_another_width_than_verifys_is_refused(make_engine, task, generation, captured):
    """Otherwise rows would be assigned to the wrong requests."""

    def run():
        engine = make_engine(Wider("WIDER"), generation=generation, batch_sizes=[8])
        if captured:
            engine.capture()
        engine.generate(task.prompts[:4], SamplingParams(max_new_tokens=6))

    with pytest.raises(GraphkitError, match=r"(?i)verif"):
        run()


@each_generation
@pytest.mark.parametrize("algorithm", [SpecAlgorithm.EAGLE, SpecAlgorithm.NONE])
def test_no_drafter_needs_a_verify_of_one_row(make_engine, task, generation, algorithm):
    with pytest.raises(ConfigError, match="num_draft_tokens"):
        make_engine(algorithm, drafter=lambda _: None, generation=generation)
