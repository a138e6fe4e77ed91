"""The report of steps: times of every variant, nodes, and on CUDA the bound."""

from __future__ import annotations

from collections import defaultdict
from functools import partial

import pytest
import torch
from transformers import MixtralConfig

from graphkit.cli.benchmarks import (
    MeasuredEngine,
    StepBench,
    Variant,
    WeightBytes,
    make_variants,
    step_bench,
)
from graphkit.models import random_model, reference_model

VARIANTS = tuple(make_variants(("v1", "v2", "v3"), (1, 2)))
TIMES = ["time per step", "p50", "p99", "accept length", "tokens"]


def bench(algorithm="EAGLE", *, models=None, variants=VARIANTS, num_steps=1, **options):
    models = models or random_model("tiny", algorithm, device="cpu")
    spec = models.spec(num_steps=num_steps)
    return StepBench(
        engine=partial(models.engine_with, spec), spec=spec, algorithm=algorithm,
        device=models.device, dtype=models.dtype, weights=WeightBytes.of(models, 1),
        variants=variants, text_ids=range(100), context=5, steps=2, rounds=2, **options,
    )  # fmt: skip


def values_of(report):
    """Return values by setting, variant and name."""
    values = defaultdict(lambda: defaultdict(dict))
    for each in report.measures:
        values[each.setting][each.variant][each.name] = each.value
    return values


@pytest.fixture(scope="module")
def on_cpu():
    return bench().report("name", [1, 3], {"note": "text"})


@pytest.mark.slow
def test_every_variant_of_every_batch_size_is_measured(on_cpu):
    values = values_of(on_cpu)
    assert list(values) == ["", "batch 1", "batch 3"]
    for setting in ("batch 1", "batch 3"):
        rows = values[setting]
        assert set(rows) == {"", "v1", "v2", "one launch", "loop of 2"}
        assert all(list(rows[name]) == TIMES for name in rows if name)
        assert 0 < rows[""]["own nodes"] < rows[""]["nodes"]


@pytest.mark.slow
def test_tokens_per_second_are_those_of_the_measured_length(on_cpu):
    for name, row in values_of(on_cpu)["batch 3"].items():
        if name:
            per_second = 3 / row["time per step"] * 1e3
            assert row["tokens"] == pytest.approx(row["accept length"] * per_second)


@pytest.mark.slow
def test_steps_are_counted_by_their_draft_length():
    rows = values_of(bench(num_steps=(0, 1, 2)).report("name", [2], {}))["batch 2"]
    for name in ("v1", "v2", "one launch", "loop of 2"):
        shares = [rows[name][f"steps of {drafts} drafts"] for drafts in (0, 1, 2)]
        assert sum(shares) == pytest.approx(1.0)
        assert 0.2 < rows[name]["speed over plain decoding"] < 3


def test_a_report_has_the_settings_and_on_the_cpu_no_measure_of_cuda():
    report = bench(variants=VARIANTS[2:]).report("name", [1], {"note": "text"})
    names = {each.name for each in report.measures}
    assert not names & {"GPU busy", "bare step", "copy bandwidth"}
    assert report.name == "name"
    assert report.settings == {
        "algorithm": "EAGLE", "topk": 1, "num_steps": 1, "num_draft_tokens": 2,
        "dtype": "bfloat16", "context": 5, "steps per round": 2, "rounds": 2, "note": "text",
    }  # fmt: skip


@pytest.fixture
def events(monkeypatch):
    """Make the recorder measure what a CUDA device does; returns the rounds."""
    found, run = [], MeasuredEngine.run

    def noted(engine, steps, into):
        found.append(engine._variant.name)
        run(engine, steps, into)

    monkeypatch.setattr(StepBench, "_is_cuda", True)
    monkeypatch.setattr(MeasuredEngine, "run", noted)
    monkeypatch.setattr(step_bench, "copy_bandwidth", lambda device: 4e9)
    monkeypatch.setattr(step_bench.gc, "collect", lambda: 0)  # takes 0.3 s per measure here
    return found


def test_what_cuda_adds(events):
    measured = bench(variants=VARIANTS[1:3])
    row = values_of(measured.report("name", [1], {}))["batch 1"]
    for name in ("v2", "one launch"):
        assert list(row[name]) == [*TIMES, "GPU busy"]
        busy = row[""]["bare step"] / row[name]["time per step"]
        assert row[name]["GPU busy"] == busy
    bound_ms = measured.weights.total / 4e9 * 1e3
    assert row[""]["copy bandwidth"] == 4.0
    assert row[""]["weights at the copy bandwidth"] == bound_ms
    assert row[""]["bare step over that"] == row[""]["bare step"] / bound_ms


def test_variants_take_turns(events):
    bench("NONE", variants=VARIANTS[:2]).report("name", [1, 2], {})
    assert events == 4 * ["v1", "v2"]


def test_there_is_no_bare_step_without_v3(events):
    row = values_of(bench("NONE", variants=VARIANTS[:1]).report("name", [1], {}))["batch 1"]
    assert list(row) == ["v1"]
    assert "GPU busy" not in row["v1"]


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["EAGLE", "NGRAM"])
def test_all_variants_run_the_same_steps_and_no_request_ends(algorithm, monkeypatch):
    """Reference models accept most drafts, so that they need the most room."""
    models, run, asked = reference_model(algorithm, device="cpu"), MeasuredEngine.run, []

    def noted(engine, steps, into):
        asked.append(steps)
        run(engine, steps, into)

    monkeypatch.setattr(MeasuredEngine, "run", noted)
    variants = (Variant("v2", "v2"), Variant("loop of 5", "v3", 5))
    report = bench(algorithm, models=models, variants=variants).report("name", [1], {})
    assert asked == [5] * 4, "two rounds of each"
    assert report.settings["steps per round"] == 5
    rows = values_of(report)["batch 1"]
    assert rows["v2"]["accept length"] == rows["loop of 5"]["accept length"] >= 1


def test_progress_names_every_act():
    acts = []
    measured = bench("NONE", variants=VARIANTS[:1])
    measured.report("name", [1, 2], {}, lambda done, parts, what: acts.append((done, parts, what)))
    assert acts == [
        (0, 2, "batch 1: capturing v1"),
        (0, 2, "batch 1, round 1 of 2: v1"),
        (0, 2, "batch 1, round 2 of 2: v1"),
        (1, 2, "batch 2: capturing v1"),
        (1, 2, "batch 2, round 1 of 2: v1"),
        (1, 2, "batch 2, round 2 of 2: v1"),
    ]


def test_the_chosen_experts_of_a_step_are_counted(tmp_path):
    """A row of plain decoding chooses two of the experts of each layer."""
    MixtralConfig(
        vocab_size=128, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, num_local_experts=16, num_experts_per_tok=2,
    ).save_pretrained(tmp_path)  # fmt: skip
    models = random_model(tmp_path, "NONE", device="cpu", dtype=torch.float32)
    weights, size = WeightBytes.of(models, 1), 4 * 3 * 32 * 48
    assert len(weights.experts) == 2
    every = sum(each.nbytes for each in models.model.parameters())
    assert weights.verify == every - 2 * 16 * size - 4 * 128 * 32  # less the embedding
    run = bench("NONE", models=models, variants=VARIANTS[2:3])
    rows = values_of(run.report("name", [1, 3], {}))
    assert rows["batch 1"][""]["experts read by a step"] * 1e6 == pytest.approx(2 * 2 * size)
    assert 2 * 2 * size < rows["batch 3"][""]["experts read by a step"] * 1e6 <= 2 * 6 * size
    assert not any("_graphkit_touched" in vars(module) for module in models.model.modules())
