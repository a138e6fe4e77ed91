"""``tools/bench/decode_step.py`` on the CPU: every way is measured at each batch size."""

from __future__ import annotations

import pytest
import torch

CPU = torch.device("cpu")


@pytest.mark.slow
def test_every_way_is_measured_at_each_size(bench, monkeypatch):
    monkeypatch.setattr(bench, "TOKENS", 4)
    monkeypatch.setattr(bench, "CONTEXT", 8)
    report = bench.report(1, CPU, "tiny")
    ways = (
        "generate, dynamic cache", "generate, static cache", "torch.compile, max-autotune",
        "graphkit",
    )  # fmt: skip
    assert {(each.setting, each.variant) for each in report.measures} == {
        (f"batch {size}", way) for size in bench.BATCH_SIZES for way in ways
    }


@pytest.mark.slow
def test_the_compiled_loop_generates_what_the_model_does(bench):
    model = bench.model_of_transformers("tiny", CPU).eval()
    ids = torch.randint(3, model.config.vocab_size, (2, bench.CONTEXT))
    with torch.no_grad(), bench.by_max_autotune(model, ids) as generate:
        compiled = generate(4)
        expected = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0,
            eos_token_id=None, max_new_tokens=4,
        )  # fmt: skip
    assert compiled.flatten().tolist() == expected[:, -1].tolist()
