"""Accept lengths over keys and values in float8_e4m3fn."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch

import graphkit as gk
from graphkit.models.reference import reference_engine
from graphkit.models.tokenizer import ByteTokenizer

BENCH = Path(__file__).parents[3] / "tools" / "bench"
FP8 = torch.float8_e4m3fn


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["EAGLE", "EAGLE3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_trained_drafts_are_accepted_as_often(algorithm, dtype):
    """Accept lengths with FP8 keys and values; the text is the target's own over the same pool."""
    texts = (
        "def replay(self, batch):", "import torch\n", "class Runner:\n    def __init__(self",
        "for index in range(", "    if self.is_open:\n        return", "    raise ConfigError(f",
    )  # fmt: skip
    prompts = [ByteTokenizer().encode(text) for text in texts]
    params = gk.SamplingParams(max_new_tokens=64)
    sizes = {"max_batch_size": len(prompts), "max_context_len": 160, "device": "cpu"}
    found = {}
    for kv_dtype in (None, FP8):
        with reference_engine(
            algorithm, num_steps=3, dtype=dtype, kv_dtype=kv_dtype, **sizes
        ) as engine:
            engine.capture()
            texts = [each.output_ids for each in engine.generate(prompts, params)]
            found[kv_dtype] = texts, engine.stats.accept_length
    (texts, length), (fp8_texts, fp8_length) = found.values()
    assert fp8_length > 0.9 * length
    begins = [one[:8] == other[:8] for one, other in zip(texts, fp8_texts, strict=True)]
    assert sum(begins) >= 4
    if dtype == torch.float32:
        with reference_engine("NONE", dtype=dtype, kv_dtype=FP8, **sizes) as engine:
            engine.capture()
            own = engine.generate(prompts, params)
        assert [each.output_ids for each in own] == fp8_texts


@pytest.mark.gpu
@pytest.mark.parametrize("algorithm", ["EAGLE", "EAGLE3"])
def test_accept_lengths_are_those_of_bfloat16(algorithm, monkeypatch):
    """The texts differ, so that the lengths of one prompt differ by 0.3 tokens (one deviation).

    The mean over 64 prompts then deviates by 0.04 of 3.4 tokens, and 5 % are four deviations.
    """
    monkeypatch.syspath_prepend(BENCH)
    prompts = runpy.run_path(str(BENCH / "accept_lengths.py"))["held_out_prompts"](64)
    lengths = []
    for kv_dtype in (None, FP8):
        with reference_engine(
            algorithm,
            num_steps=3,
            dtype=torch.bfloat16,
            kv_dtype=kv_dtype,
            max_batch_size=8,
            device="cuda",
        ) as engine:
            engine.capture()
            engine.generate(prompts, gk.SamplingParams(max_new_tokens=64))
            lengths.append(engine.stats.accept_length)
            assert all(not runner.stats.fallbacks for runner in engine.runners)
    assert lengths[1] > 0.95 * lengths[0], lengths
