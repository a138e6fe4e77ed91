"""``SpeculativeEngine.capture`` prepares prefills, so that the first request waits for nothing."""

from __future__ import annotations

import pytest
import torch

from graphkit.engine import EagleDrafter, SamplingParams
from graphkit.errors import CaptureError
from graphkit.step import Prefill

each_generation = pytest.mark.parametrize("generation", ["v1", "v2", "v3"])


@each_generation
def test_chunks_of_several_lengths_run_on_pads(make_engine, generation):
    lengths = []

    class Noting(EagleDrafter):
        def prefill(self, chunk):
            assert chunk.req_pool_indices.tolist() == [0]
            assert not chunk.out_cache_loc.any()
            lengths.append(len(chunk.input_ids))
            super().prefill(chunk)

    engine = make_engine(drafter=Noting, generation=generation, chunked_prefill_size=40)
    engine.capture()
    assert set(lengths) == ({1, 15, 16, 40} if engine.device.type == "cuda" else {1, 40})
    assert engine.stats.fallbacks == {}


@each_generation
def test_an_error_in_a_prefill_ends_the_capture(make_engine, generation):
    class Failing(EagleDrafter):
        def prefill(self, chunk):
            if len(chunk.input_ids) == 1:
                raise ValueError("an odd number")
            super().prefill(chunk)

    engine = make_engine(drafter=Failing, generation=generation)
    with pytest.raises(CaptureError, match="an odd number"):
        engine.capture()
    assert {runner.status for runner in engine.runners} == {"planned"}


@pytest.mark.parametrize("topk", [1, 2], ids=["chain", "tree"])
@each_generation
def test_the_first_request_compiles_no_kernel(make_engine, task, monkeypatch, generation, topk):
    """In v1 and v2, of its prefill: their kernels between graphs are compiled by the first step."""
    if make_engine.device != "cuda":
        pytest.skip("the torch references compile nothing")
    import triton

    engine = make_engine(generation=generation, topk=topk, batch_sizes=[1, 8])
    engine.capture()
    compiled, run = [], Prefill.run
    is_checked = generation == "v3"

    def run_checked(*args, **options):
        nonlocal is_checked
        before, is_checked = is_checked, True
        try:
            return run(*args, **options)
        finally:
            is_checked = before

    def on_compiled(**each):
        if is_checked:
            compiled.append(each["repr"])

    monkeypatch.setattr(Prefill, "run", run_checked)
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", on_compiled)
    for temperature in (0.0, 0.7):
        sampling = SamplingParams(max_new_tokens=9, temperature=temperature)
        engine.generate([task.prompts[3]], sampling)
    torch.cuda.synchronize()
    assert compiled == []
