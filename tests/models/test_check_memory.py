"""The check at load computes the logits of few rows at a time."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from graphkit import models
from graphkit.engine import SamplingParams
from graphkit.models.load_check import check_loaded
from graphkit.models.wrapper.model_logits import ModelLogits
from small_models import small_model

PEAK_OF_CHECKS = """
import gc, json, sys
from pathlib import Path
from graphkit import models
from graphkit.engine import SamplingParams
from graphkit.models.load_check import check_loaded
from small_models import small_model

def resident(kind):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(kind))

def peak(vocab_size, window):
    loaded = models.load(
        small_model("gemma3_text", vocab_size=vocab_size, sliding_window=window,
                    max_position_embeddings=1024),
        device="cpu", check=False,
    )
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    before = resident("VmRSS")
    check_loaded(loaded)
    return resident("VmHWM") - before

peak(128, 8)  # imports what the check imports
print(json.dumps([peak(*map(int, each.split(","))) for each in sys.argv[1:]]))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_memory_does_not_grow_with_rows_and_vocabulary():
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "MALLOC_MMAP_THRESHOLD_": str(2**16),  # the C library returns freed tensors at once
    }
    sizes = ["128000,8", "128000,500"]
    done = subprocess.run(
        [sys.executable, "-c", PEAK_OF_CHECKS, *sizes],
        env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    peaks = json.loads(done.stdout.splitlines()[-1])
    assert max(peaks) < 40e6, peaks  # logits of 508 rows of 128,000 numbers have 260 MB


def most_logits(model):
    """Return the largest number of logits that the model and its wrapper compute at once."""
    loaded = models.load(model, device="cpu", check=False)
    found = []
    for each in (loaded.model, loaded.original):
        each.lm_head.register_forward_hook(lambda _, __, output: found.append(output.numel()))
    check_loaded(loaded)
    return max(found)


def test_few_logits_are_computed_at_once():
    sizes = {"max_position_embeddings": 256, "sliding_window": 100}
    for vocab_size in (20_000, 60_000):
        model = small_model("gemma3_text", vocab_size=vocab_size, **sizes)
        assert most_logits(model) <= 2**20


@pytest.mark.parametrize("sizes", [(), (8, 64)], ids=["eager", "captured"])
def test_prompts_compute_the_logits_of_their_last_tokens_alone(sizes):
    loaded = models.load(small_model("llama"), device="cpu")
    rows = []
    loaded.model.lm_head.register_forward_hook(lambda _, __, output: rows.append(output.shape[-2]))
    with loaded.engine(algorithm="NONE", max_context_len=64, prefill_sizes=sizes) as engine:
        engine.capture()
        captured = set(rows)
        rows.clear()
        engine.generate([[*range(5, 45)]], SamplingParams(max_new_tokens=1))
    assert captured.isdisjoint(range(9, 100))
    assert rows == ([] if sizes else [1])


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "cohere", "granite", "opt", "mamba"])
def test_logits_of_some_rows_are_those_of_all(kind):
    """Gemma bounds its logits behind the head, Cohere and Granite scale them."""
    model = small_model(kind)
    ids = torch.randint(0, 128, (20,), generator=torch.Generator().manual_seed(0))
    logits = ModelLogits(model, torch.device("cpu"), 128)
    run = logits.of(ids)
    expected = model(ids[None]).logits[0]
    for positions in ([3], range(20), [19, 0, 7]):
        assert torch.allclose(run.rows(positions), expected[list(positions)], atol=1e-5)
    assert "forward" not in vars(model.base_model)
