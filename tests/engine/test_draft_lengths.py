"""Several draft lengths in one engine: the text of plain decoding, whatever runs when."""

from __future__ import annotations

from copy import copy
from random import Random

import pytest
import torch

from draft_choices import choices_of, column_of_lengths, force_lengths, force_variant
from engine_runs import finish, outputs, refuses, submit_all
from graphkit.engine import Drafter, NgramDrafter, SamplingParams
from graphkit.engine.step.draft_tree import ChainTree
from graphkit.errors import ConfigError
from graphkit.ops import draft_length

GENERATIONS = ["v1", "v2", "v3"]
every_generation = pytest.mark.parametrize("generation", GENERATIONS)
LENGTHS = [
    pytest.param({"num_steps": (0, 1, 3, 5)}, id="chain"),
    pytest.param({"num_steps": (1, 2, 4)}, id="never plain"),
    pytest.param({"num_steps": (0, 2, 3), "topk": 2}, id="tree"),
    pytest.param({"num_steps": (0, 2, 2), "topk": 2, "num_draft_tokens": (1, 3, 6)}, id="widths"),
]
any_lengths = pytest.mark.parametrize("lengths", LENGTHS)


def run_with_random_times(engine, random):
    """Let steps, or launches, run random lengths, and those first that have not run yet.

    How many launches there are depends on how fast a device runs them.
    """
    chooser = choices_of(engine)
    columns = column_of_lengths(chooser)
    while engine.has_work:
        drafted = engine.stats.drafted_lengths
        missing = [column for column in columns if chooser.drafts[column] not in drafted]
        force_variant(engine, random.choice(missing or range(chooser.count)))
        engine.step()


@pytest.mark.slow
@every_generation
@any_lengths
def test_greedy_text_is_that_of_plain_decoding(make_engine, task, generation, lengths):
    engine = make_engine(
        **lengths, generation=generation, steps_per_launch=2, batch_sizes=[1, 4, 8]
    )
    engine.capture()
    most = task.first(24)
    requests = submit_all(engine, most.prompts, most.sampling())
    run_with_random_times(engine, Random(3))
    assert outputs(requests) == most.expected
    drafted = engine.stats.drafted_lengths
    assert {spec.num_draft_tokens - 1 for spec in engine.spec.lengths} <= set(drafted)
    assert sum(drafted.values()) == engine.stats.num_verifies


@pytest.mark.slow
@any_lengths
def test_sampled_text_does_not_depend_on_the_lengths(make_engine, task, lengths):
    texts = []
    fixed = {"num_steps": 3, "topk": lengths.get("topk", 1)}
    for options in (fixed, *({**lengths, "generation": each} for each in GENERATIONS)):
        engine = make_engine(**options, steps_per_launch=3, batch_sizes=[2, 6], max_batch_size=6)
        engine.capture()
        requests = submit_all(
            engine,
            task.prompts[:9],
            lambda index: SamplingParams(max_new_tokens=11, temperature=0.9, seed=index),
        )
        if options is fixed:
            finish(engine)
        else:
            run_with_random_times(engine, Random(5))
        texts.append(outputs(requests))
        engine.close()
    assert texts[1:] == texts[:1] * len(GENERATIONS)


@pytest.mark.slow
@every_generation
@pytest.mark.parametrize("topk", [1, 2])
@pytest.mark.parametrize("algorithm", ["EAGLE3", "STANDALONE", "NGRAM", "MULTI_LAYER_EAGLE"])
def test_every_drafter_that_has_lengths(make_engine, task, algorithm, topk, generation):
    engine = make_engine(
        algorithm, num_steps=(0, 1, 3), topk=topk, generation=generation, batch_sizes=[8],
        steps_per_launch=2,
    )  # fmt: skip
    engine.capture()
    short = task.first(10)
    requests = submit_all(engine, short.prompts, short.sampling())
    run_with_random_times(engine, Random(7))
    assert outputs(requests) == short.expected


@pytest.mark.slow
@every_generation
@pytest.mark.parametrize("plain_steps", [1, 3, 8])
def test_a_draft_after_plain_steps_is_as_good_as_before(make_engine, task, generation, plain_steps):
    """A draft model without errors loses no acceptance if its KV is complete."""
    engine = make_engine(
        "EXACT", num_steps=(0, 3), generation=generation, batch_sizes=[2], max_batch_size=2,
        steps_per_launch=1,
    )  # fmt: skip
    engine.capture()
    for prompt in task.prompts[:2]:
        engine.submit(prompt, SamplingParams(max_new_tokens=52))
    turn = 0
    while engine.has_work:
        is_plain = turn % (plain_steps + 2) < plain_steps
        force_lengths(engine, (0.01, 1.0) if is_plain else (1.0, 0.01))
        engine.step()
        turn += 1
    drafted, accepted = engine.stats.drafted_lengths, engine.stats.accepted_lengths
    assert set(drafted) == {0, 3}
    assert drafted[3] >= 10
    # The model errs at the start alone, since it does not see the first token of a prompt.
    assert drafted[3] - accepted[4] <= 6


def test_before_the_capture_the_longest_runs(make_engine, task):
    engine = make_engine(num_steps=(0, 1, 3))
    engine.generate(task.prompts[:2], SamplingParams(max_new_tokens=4))
    assert set(engine.stats.drafted_lengths) == {3}


def test_a_drafter_of_one_length_is_refused(make_engine):
    class OneLength(NgramDrafter):
        at_length = Drafter.at_length

    with refuses(ConfigError, "num_steps", r"OneLength has one\. Define at_length"):
        make_engine(num_steps=(1, 2), drafter=lambda _model: OneLength())


@pytest.mark.slow
@every_generation
@any_lengths
def test_layers_catch_up_in_steps_of_every_length(make_engine, task, generation, lengths):
    """All layers run in the graphs of the longest length, so that no layer misses a token."""
    engine = make_engine(
        "MULTI_LAYER_EAGLE", **lengths, generation=generation, batch_sizes=[1, 4],
        max_batch_size=4, steps_per_launch=1,
    )  # fmt: skip
    engine.capture()
    runners = engine._spec_step.runners
    assert len([runner for runner in runners if runner.label == "MULTI_LAYER_EAGLE"]) == 1
    requests = submit_all(
        engine,
        task.prompts[:6],
        lambda i: SamplingParams(max_new_tokens=17, temperature=0.9 * (i % 2), seed=i),
    )
    run_with_random_times(engine, Random(4))
    plain = make_engine("NONE", batch_sizes=[4], max_batch_size=4)
    expected = [
        plain.generate(
            [prompt], SamplingParams(max_new_tokens=17, temperature=0.9 * (i % 2), seed=i)
        )
        for i, prompt in enumerate(task.prompts[:6])
    ]
    assert outputs(requests) == [e[0].output_ids for e in expected]
    drafted = engine.stats.drafted_lengths
    assert {spec.num_draft_tokens - 1 for spec in engine.spec.lengths} <= set(drafted)


@pytest.mark.slow
def test_layers_draft_as_well_at_every_length(make_engine, task):
    """The first layer's draft is right as often in short drafts as in long ones."""
    shares = {}
    for steps in (1, 3, (1, 3)):
        engine = make_engine("MULTI_LAYER_EAGLE", num_steps=steps, batch_sizes=[8])
        engine.capture()
        for prompt in task.prompts[:8]:
            engine.submit(prompt, SamplingParams(max_new_tokens=50))
        if isinstance(steps, tuple):
            run_with_random_times(engine, Random(6))
        finish(engine)
        accepted = engine.stats.accepted_lengths
        shares[steps] = 1 - accepted[1] / sum(accepted.values())
    assert shares[(1, 3)] > 0.9 * min(shares[1], shares[3]) > 0.2


@pytest.mark.slow
def test_times_are_those_of_the_graphs(make_engine):
    engine = make_engine(num_steps=(0, 1, 3), batch_sizes=[1, 8])
    engine.capture()
    times = choices_of(engine).times
    lengths = list(column_of_lengths(choices_of(engine)))
    assert (times[:, lengths].diff(dim=1) > 0).all(), "longer drafts take longer"
    assert (times[:, -1] > times[:, 0]).all(), "a catch-up takes longer"
    assert (times[1] > times[0]).all(), "larger batches take longer"
    assert torch.equal(times, choices_of(engine).times)


def test_measured_replays_compute_pads(make_engine, monkeypatch):
    """Entries of earlier steps have addresses of tensors that may have been freed since."""
    engine = make_engine(num_steps=(0, 1, 3), batch_sizes=[1, 8], generation="v2")
    backend_type = type(engine.runners[0].capturing_backend())
    measure, measured = backend_type.measure, set()

    def checked(backend, graph):
        cost = measure(backend, graph)
        # On CUDA, prompts are measured before the runners of steps are captured.
        for runner in engine.runners if engine.runners[-1].status == "captured" else ():
            for size, captured in runner.graphs.items():
                if captured is graph:
                    measured.add((runner, size))
                    for layout in runner.buffers.layouts:
                        rows = runner.buffers.live_rows(layout.name, size)
                        assert (rows == layout.pad).all(), layout.name
        return cost

    monkeypatch.setattr(backend_type, "measure", checked)
    engine.capture()
    assert {size for _, size in measured} == {1, 8, 3, 24}, "with two drafts for each of three"
    assert len({runner for runner, _ in measured}) > 3, "runners of every length"


@pytest.mark.slow
@every_generation
def test_steps_between_chunks_of_a_prompt_adapt(make_engine, task, generation):
    """A draft after plain steps loses no acceptance while another prompt is prefilled."""
    engine = make_engine(
        "EXACT", num_steps=(0, 3), generation=generation, batch_sizes=[2], max_batch_size=2,
        steps_per_launch=4, chunked_prefill_size=1,
    )  # fmt: skip
    engine.capture()
    longest = max(task.prompts, key=len)
    first = engine.submit(task.prompts[0], SamplingParams(max_new_tokens=40))
    engine.step()
    joining = engine.submit(longest, SamplingParams(max_new_tokens=1))
    for _ in range(len(longest) // 2):
        force_lengths(engine, (0.01, 1.0))
        engine.step()
    assert not joining.output_ids, "its prompt is being prefilled"
    assert set(engine.stats.drafted_lengths) <= {0, 3}
    plain = engine.stats.drafted_lengths[0]
    assert plain >= len(longest) // 2 - 4
    while engine.has_work:
        force_lengths(engine, (1.0, 0.01))
        engine.step()
    drafted, accepted = engine.stats.drafted_lengths, engine.stats.accepted_lengths
    assert drafted[3] > 3
    assert drafted[3] - accepted[4] <= 3
    known = task.expected[0]
    assert (first.output_ids[: len(known)], len(first.output_ids)) == (known, 40)


@pytest.mark.slow
@pytest.mark.parametrize("generation", ["v1", "v2"])
def test_prompts_between_steps_do_not_count_as_time_of_steps(
    make_engine, task, generation, monkeypatch
):
    """The host's clock times the steps that follow each other."""
    engine = make_engine(
        "EXACT", num_steps=(0, 3), generation=generation, batch_sizes=[2], max_batch_size=2,
        chunked_prefill_size=1,
    )  # fmt: skip
    engine.capture()
    choices, now = choices_of(engine), [1]
    known = choices.times.clone()
    monkeypatch.setattr(choices, "_times_steps", True)
    monkeypatch.setattr(draft_length, "clock_ns", lambda: now[0])
    longest = max(task.prompts, key=len)
    engine.submit(task.prompts[0], SamplingParams(max_new_tokens=60))
    for _ in range(len(task.prompts[0])):
        engine.step()
    joining = engine.submit(longest, SamplingParams(max_new_tokens=1))
    for _ in range(5):
        now[0] += 10**12
        engine.step()
    assert torch.equal(choices.times, known)
    engine.abort(joining)
    for _ in range(4):
        now[0] += 10**12
        engine.step()
    assert (choices.times > known).any(), "steps that follow each other are timed"


class EverySecondText(Drafter):
    """Drafts the text of every second prompt, and wrong tokens for the others."""

    def __init__(self, prompts, texts):
        pairs = zip(prompts[1::2], texts[1::2], strict=True)
        self._texts = {tuple(prompt): [*prompt, *text] for prompt, text in pairs}

    def prepare(self, context):
        self._drafts = torch.zeros_like(context.req_to_token, dtype=torch.int64)
        self._prompts = {}
        self._set_length(context)

    def at_length(self, context):
        other = copy(self)
        other._set_length(context)
        return other

    def _set_length(self, context):
        self._width = context.verify_width
        self._tree = ChainTree.one_chain(context, self._width)
        self._column = torch.arange(self._width, device=context.device)

    @property
    def max_path(self):
        return self._width

    def prefill(self, chunk):
        row = int(chunk.req_pool_indices)
        before = self._prompts.setdefault(row, []) if chunk.start else []
        self._prompts[row] = prompt = before + chunk.input_ids.tolist()
        if chunk.is_last and row:
            self._drafts[row] = 0
            if (text := self._texts.get(tuple(prompt))) is not None:
                self._drafts[row, : len(text)] = torch.tensor(text)

    def draft(self, req_pool_indices, seq_lens, bonus_tokens):
        place = (seq_lens[:, None] + self._column).clamp(max=self._drafts.shape[1] - 1)
        return self._tree.of(self._drafts[req_pool_indices].gather(1, place))

    def extend(self, verified):
        pass


@pytest.mark.slow
@every_generation
@pytest.mark.parametrize("size", [2, 8])
def test_rows_go_to_the_requests_whose_drafts_are_accepted(make_engine, task, generation, size):
    """A step of two rows per request verifies more drafts of some requests than of others."""
    prompts, sampling = task.prompts[:size], SamplingParams(max_new_tokens=48)
    plain = make_engine("NONE", max_batch_size=1)
    texts = [plain.generate([prompt], sampling)[0].output_ids for prompt in prompts]
    engine = make_engine(
        num_steps=(0, 4), generation=generation, batch_sizes=[size], max_batch_size=size,
        steps_per_launch=1, drafter=lambda _model: EverySecondText(prompts, texts),
    )  # fmt: skip
    engine.capture()
    assert choices_of(engine).row_counts.tolist() == [[size, 2 * size, 3 * size, 5 * size]]
    requests = [engine.submit(prompt, sampling) for prompt in prompts]
    known, unknown = requests[1::2], requests[::2]
    while not any(request.is_finished for request in known):
        force_variant(engine, 1)
        engine.step()
    drafted = [sum(request.num_draft_tokens for request in half) for half in (known, unknown)]
    assert drafted[0] > 3 * drafted[1]
    most = max(request.num_verifies for request in requests)
    assert sum(drafted) <= size * most, "two rows per request"
    if generation == "v3":
        rows = [body.rows for body in engine.runners[0]._loops.records()[0].bodies]
        assert rows == [size, 2 * size, 3 * size, 5 * size, size]
    else:
        packed = engine._spec_step.longest.verifier.packed_runner
        assert packed.stats.replays_by_size == {2 * size: packed.stats.replays}
        assert packed.stats.replays > 5
    finish(engine)
    assert outputs(requests) == texts
    counts = choices_of(engine).by_request
    before = counts.any(2).any(1).sum()
    engine.generate(prompts, SamplingParams(max_new_tokens=1))
    assert counts.any(2).any(1).sum() < before, "a request begins without counts"
