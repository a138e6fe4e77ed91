"""``SpeculativeEngine.capture`` compiles all kernels, so that the first request waits for none."""

from __future__ import annotations

import random
from functools import partial
from itertools import product

import pytest
import torch
import triton
from transformers import LlamaConfig

from engine_runs import each_generation, finish
from graphkit.engine import EagleDrafter, SamplingParams
from graphkit.engine.attention import TritonAttention
from graphkit.engine.step.admission import warm_up_chunks
from graphkit.engine.step.pad_steps import warm_up_steps
from graphkit.errors import CaptureError
from graphkit.models import random_model
from graphkit.ops.kernels.step_state import begin_step_kernel
from recorded_launches import record_launches

runs_kernels = pytest.mark.skipif(
    not isinstance(begin_step_kernel, triton.JITFunction), reason="TRITON_INTERPRET is set"
)


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
    expected = warm_up_chunks(40, 40, 8) if is_cuda else [[1], [40]]
    assert set(lengths) == {tuple(each) for each in expected}
    assert engine.stats.fallbacks == {}


@pytest.mark.parametrize(("longest", "budget", "most"), [(1, 1, 1), (40, 40, 3), (100, 512, 64)])
def test_chunks_of_a_warm_up_fit_a_forward(longest, budget, most):
    batches = warm_up_chunks(longest, budget, most)
    assert all(sum(lengths) <= budget and max(lengths) <= longest for lengths in batches)
    assert all(min(lengths) > 0 and len(lengths) <= most for lengths in batches)
    assert [longest] in batches
    assert max(map(sum, batches)) == min(budget, longest * most)
    assert {len(lengths) for lengths in batches} >= {1, most}


def test_the_batches_of_a_warm_up_grow_with_the_logarithm_of_the_tokens():
    few, many = (len(warm_up_chunks(tokens, tokens, 8)) for tokens in (512, 8192))
    assert many == few + 4 * (2 + 3), "two lengths of one request, one of 2, 4 and 8"


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
    warm_up_steps(engine._spec_step, engine.runners[0].capturing_backend())
    assert steps == [[0], "extended"] * 2 + [[0, 0], "extended"] * 2
    assert engine.stats == before
    finish(engine)
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
    prompts = [[[5] * length] for length in (20, 33, 70)] + [task.prompts[:5]]
    for temperature, batch in product((0.0, 0.7), [[task.prompts[3]], *prompts]):
        engine.generate(batch, SamplingParams(max_new_tokens=9, temperature=temperature))
    torch.cuda.synchronize()
    assert compiled == []


def random_chunks(seed, longest, budget, most_requests):
    """Return the lengths of chunks of a batch, as a queue of prompts may have them."""
    draw = random.Random(seed)
    count = draw.randint(1, most_requests)
    total = draw.randint(count, min(budget, count * longest))
    first = draw.randint(-(-total // count), min(longest, total - count + 1))
    return [first, *(max(1, min(first, (total - first) // count)) for _ in range(count - 1))]


@pytest.mark.slow
@runs_kernels
@pytest.mark.parametrize(
    ("quantize", "context"), [(None, 512), ("fp8", 512), ("int4", 512), ("fp8", 90)]
)
def test_batches_of_prompts_launch_no_other_kernel(quantize, context, monkeypatch, tmp_path):
    sizes = LlamaConfig(
        vocab_size=64, hidden_size=256, intermediate_size=512, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, head_dim=128, max_position_embeddings=512,
    )  # fmt: skip
    sizes.save_pretrained(tmp_path)
    model = random_model(tmp_path, "EAGLE", device="cpu", quantize=quantize)
    longest, budget, most = min(300, context), 300, 12
    engine = model.engine(
        max_batch_size=most, max_context_len=context, generation="v2",
        attention=TritonAttention, chunked_prefill_size=budget,
    )  # fmt: skip
    prefill = partial(engine._admission._run_pads, is_greedy=True)
    launched = record_launches(monkeypatch)
    with torch.no_grad():
        for lengths in warm_up_chunks(longest, budget, most):
            prefill(lengths)
        expected = set(launched)
        others = [[length] for length in range(3, longest, 23)]
        others += [random_chunks(seed, longest, budget, most) for seed in range(40)]
        for lengths in others:
            prefill(lengths)
            assert launched == expected, lengths
