"""``SpeculativeEngine.capture`` compiles all kernels, so that the first request waits for none."""

from __future__ import annotations

import pytest
import torch

from graphkit.engine import EagleDrafter, SamplingParams
from graphkit.errors import CaptureError

each_generation = pytest.mark.parametrize("generation", ["v1", "v2", "v3"])


@pytest.mark.slow
@each_generation
def test_chunks_of_several_lengths_run_on_pads(make_engine, generation):
    lengths = []

    class Noting(EagleDrafter):
        def prefill_batch(self, batch):
            assert not batch.req_pool_indices.any()
            assert not batch.out_cache_loc.any()
            lengths.append(tuple(batch.lengths))
            super().prefill_batch(batch)

    engine = make_engine(drafter=Noting, generation=generation, chunked_prefill_size=40)
    engine.capture()
    is_cuda = engine.device.type == "cuda"
    each, requests = ((1, 15, 16, 40), (1, 2, 8)) if is_cuda else ((1, 40), (1,))
    assert set(lengths) == {(length,) * count for length in each for count in requests}
    assert engine.stats.fallbacks == {}


@each_generation
def test_an_error_in_a_prefill_ends_the_capture(make_engine, generation):
    class Failing(EagleDrafter):
        def prefill_batch(self, batch):
            if batch.lengths == [1]:
                raise ValueError("an odd number")
            super().prefill_batch(batch)

    engine = make_engine(drafter=Failing, generation=generation)
    with pytest.raises(CaptureError, match="an odd number"):
        engine.capture()
    assert {runner.status for runner in engine.runners} == {"planned"}


@pytest.mark.parametrize("topk", [1, 2], ids=["chain", "tree"])
@pytest.mark.parametrize("generation", ["v1", "v2"])
def test_steps_of_pads_change_and_count_nothing(make_engine, task, generation, topk):
    steps = []

    class Noting(EagleDrafter):
        def draft(self, rows, seq_lens, bonus):
            steps.append(rows.tolist())
            return super().draft(rows, seq_lens, bonus)

        def extend(self, verified):
            steps.append("extended")
            super().extend(verified)

        def extend_accepted(self, verified, counts):
            steps.append("extended" if all(counts) else "idle")
            super().extend_accepted(verified, counts)

    engine = make_engine(drafter=Noting, generation=generation, topk=topk, batch_sizes=[2])
    engine.capture()
    request = engine.submit(task.prompts[3], SamplingParams(max_new_tokens=9))
    engine.step()
    before = engine.stats
    steps.clear()
    engine._schedule.warm_up(engine.runners[0].capturing_backend())
    assert steps == [[0], "extended"] * 2 + [[0, 0], "extended"] * 2
    assert engine.stats == before
    while engine.has_work:
        engine.step()
    assert request.output_ids == task.expected[3][:9]
    assert engine.stats.replays["TARGET_VERIFY"] > before.replays["TARGET_VERIFY"]


@pytest.mark.parametrize("topk", [1, 2], ids=["chain", "tree"])
@each_generation
def test_the_first_request_compiles_no_kernel(make_engine, task, monkeypatch, generation, topk):
    if make_engine.device != "cuda":
        pytest.skip("the torch references compile nothing")
    import triton

    engine = make_engine(generation=generation, topk=topk, batch_sizes=[1, 8])
    engine.capture()
    compiled = []
    monkeypatch.setattr(
        triton.knobs.runtime, "jit_post_compile_hook", lambda **each: compiled.append(each["repr"])
    )
    for temperature in (0.0, 0.7):
        sampling = SamplingParams(max_new_tokens=9, temperature=temperature)
        engine.generate([task.prompts[3]], sampling)
    torch.cuda.synchronize()
    assert compiled == []
