"""``graphkit bench``: tables or a report on stdout, and settings that it refuses."""

from __future__ import annotations

import re

import pytest
from transformers import AutoModelForCausalLM

from graphkit.cli.benchmarks import StepBench, WeightBytes
from graphkit.models.shapes import SHAPES, shape_config
from graphkit.records import BenchReport
from graphkit.spec.config import default_spec

TINY = ("--shape", "tiny", "--steps", 1, "--rounds", 1, "--context", 4, "--batch-sizes", 2)
"""The fastest settings."""


@pytest.fixture
def recorded(run):
    """Return ``recorded(argument, ...)``, which returns the report."""

    def command(*arguments):
        ended = run("bench", *arguments, "--json")
        assert ended.code == 0, ended.err
        return BenchReport.from_json(ended.out)

    return command


@pytest.fixture
def no_bench(monkeypatch):
    """Measure nothing; returns what would have been measured."""
    found = []

    def report(bench, name, sizes, notes, progress):
        found.append((bench, name, sizes, notes))
        return BenchReport(name=name, environment=_environment(), settings=notes, measures=())

    monkeypatch.setattr(StepBench, "report", report)
    return found


def _environment():
    import torch

    from graphkit.graphs import environment

    return environment(torch.device("cpu"))


@pytest.mark.slow
def test_the_tables_have_a_row_per_variant_and_the_bound_of_a_step(run):
    ended = run("bench", *TINY, "--generations", "v2,v3", "--steps-per-launch", "1,2")
    assert (ended.code, ended.messages) == (0, [])
    assert "measuring tiny on cpu: batch sizes 2; v2, one launch, loop of 2" in ended.err
    _, _, table = ended.out.partition("\nbatch 2")
    for name in ("v2", "one launch", "loop of 2"):
        assert re.search(rf"^{name} +(\d\S* *){{5}}$", table, re.MULTILINE)
    assert "own nodes" in ended.out
    assert "weights read by drafts" in ended.out
    assert "times say nothing about a GPU" in ended.out


def test_json_is_the_report_that_out_saves(run, here):
    options = ("--algorithm", "none", "--generations", "v1", "--out", "report.json", "--json")
    ended = run("bench", *TINY, *options)
    assert (ended.code, ended.messages) == (0, ["wrote report.json"])
    report = BenchReport.from_json(ended.out)
    assert report == BenchReport.load(here / "report.json")
    assert report.settings["algorithm"] == "NONE"
    assert {each.variant for each in report.measures} == {"", "v1"}


@pytest.mark.slow
def test_the_reference_model_is_measured_without_a_source(recorded):
    report = recorded(
        "--steps", 1, "--rounds", 1, "--context", 4, "--batch-sizes", 1, "--generations", "v1",
    )  # fmt: skip
    assert report.name == "steps of the reference model"
    assert report.settings["dtype"] == "float32"
    names = [each.name for each in report.measures if each.variant]
    assert names[-1] == "tokens"


def test_a_folder_is_measured_with_its_name_and_tokens(recorded, tiny_folder):
    arguments = ("--algorithm", "NGRAM", "--generations", "v2", *TINY[2:])
    report = recorded("--checkpoint", tiny_folder, *arguments)
    assert report.name == f"steps of {tiny_folder.name}"
    assert report.settings["algorithm"] == "NGRAM"


def test_a_random_eagle_3_head_is_measured(recorded):
    options = ("--algorithm", "eagle3", "--num-steps", 5, "--generations", "v1")
    report = recorded(*TINY, *options)
    assert report.settings["algorithm"] == "EAGLE3"
    assert report.settings["num_draft_tokens"] == 6
    assert any(each.name == "weights read by drafts" for each in report.measures)


@pytest.fixture
def tiny_folder(here):
    folder = here / "tiny-checkpoint"
    AutoModelForCausalLM.from_config(shape_config("tiny")).save_pretrained(folder)
    return folder


def test_the_defaults(run, no_bench):
    assert run("bench", "--shape", "tiny").code == 0
    ((bench, name, sizes, notes),) = no_bench
    assert (name, sizes, notes) == ("steps of tiny", [1, 8], {})
    names = [variant.name for variant in bench.variants]
    assert names == ["v1", "v2", "one launch", "loop of 4", "loop of 16"]
    assert (bench.context, bench.steps, bench.rounds) == (256, 16, 3)
    assert (bench.spec.num_steps, bench.spec.topk, bench.spec.num_draft_tokens) == (3, 1, 4)


def test_v3_is_left_out_where_it_cannot_run_unless_it_is_asked_for(run, no_bench, monkeypatch):
    from graphkit.graphs import RecorderBackend

    monkeypatch.setattr(RecorderBackend, "no_loop_reason", "cuda-bindings is missing")
    assert run("bench", "--shape", "tiny").code == 0
    bench, _, _, notes = no_bench.pop()
    assert [variant.name for variant in bench.variants] == ["v1", "v2"]
    assert notes == {"v3": "cannot run: cuda-bindings is missing"}
    monkeypatch.undo()
    monkeypatch.setattr(RecorderBackend, "no_loop_reason", "cuda-bindings is missing")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    ended = run("bench", *TINY, "--generations", "v3")
    assert ended.code == 2
    assert "generation 'v3' cannot run: cuda-bindings is missing" in ended.error


def test_too_little_memory_is_an_error_with_advice(run, monkeypatch):
    import torch

    def report(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB. GPU 0 has")

    monkeypatch.setattr(StepBench, "report", report)
    ended = run("bench", *TINY)
    assert (ended.code, ended.out) == (1, "")
    assert ended.error.startswith("error: the device has too little memory: CUDA out of memory.")
    assert "smaller --batch-sizes" in ended.error


def test_help_lists_every_shape(run):
    text = " ".join(run("bench", "--help").out.split())
    assert ", ".join(SHAPES) in text


def test_one_format_is_a_plain_report(recorded):
    options = ("--generations", "v1", "--quantize", "int4", "--row-invariant")
    report = recorded(*TINY, *options)
    assert report.settings["quantize"] == "int4"
    assert report.settings["row-invariant"] == "True"
    assert {each.setting for each in report.measures} == {"", "batch 2"}


@pytest.mark.slow
def test_formats_share_the_tables(run, recorded):
    options = (*TINY, "--generations", "v1", "--algorithm", "none")
    report = recorded(*options, "--quantize", "none,fp8,int4")
    rows = [each.variant for each in report.measures if each.setting == "batch 2" and each.variant]
    assert list(dict.fromkeys(rows)) == ["v1, bfloat16", "v1, fp8", "v1, int4"]
    read = {each.name: each.value for each in report.measures if not each.setting}
    assert read["weights read by verify, fp8"] < read["weights read by verify, bfloat16"]
    ended = run("bench", *options, "--quantize", "fp8,none")
    assert "measuring tiny in fp8 on cpu" in ended.err
    assert re.search(r"batch 2 *\n.*time per step(.*\n)*v1, fp8 ", ended.out)


@pytest.mark.parametrize("algorithm", ["EAGLE", "NGRAM"])
def test_the_defaults_of_a_gpu_fit_the_contexts_of_the_reference_model(algorithm):
    import torch

    from graphkit.cli.bench import _STEPS
    from graphkit.cli.benchmarks import make_variants

    bench = StepBench(
        engine=print, spec=default_spec(algorithm), algorithm=algorithm,
        device=torch.device("cuda"), dtype=torch.float32, weights=WeightBytes(0, 0),
        variants=tuple(make_variants(("v1", "v2", "v3"), (1, 4, 16))), text_ids=[1],
        context=256, steps=_STEPS["cuda"], rounds=3,
    )  # fmt: skip
    assert bench.max_context_len(8) <= 1024
