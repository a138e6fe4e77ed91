"""``tools/bench/model_kinds.py``: reports that are measured in several runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from graphkit.records import BenchReport, Environment, Measure

HERE = Environment(device="a GPU", torch="2", triton="3", cuda="13", driver="580", graphkit="0.2.0")


def report_of(bench, *cells):
    measures = (
        Measure(name="tokens per second", value=1.0, unit="1/s", setting=setting, variant=variant)
        for setting, variant in cells
    )
    settings = {**bench._settings(), "failures": ""}
    return BenchReport(name="models", environment=HERE, settings=settings, measures=tuple(measures))


@pytest.fixture
def _on_a_gpu(bench, monkeypatch):
    monkeypatch.setattr(bench, "environment", lambda _: HERE)


def test_a_kind_that_has_its_last_way_is_complete(bench):
    last = bench._COMPILED[-1]
    report = report_of(
        bench, ("llama, 1 requests", last), ("llama, 8 requests", last), ("opt, 1 requests", last),
        ("gemma2, 8 requests", "generate, static cache"),
    )  # fmt: skip
    assert bench.kinds_of(report) == {"llama"}


@pytest.mark.usefixtures("_on_a_gpu")
def test_kinds_are_added_to_a_report_of_the_same_device_and_versions(bench, tmp_path):
    path = tmp_path / "model_kinds.json"
    report = report_of(bench, ("llama, 1 requests", "graphkit, NONE"))
    path.write_text(report.to_json())
    assert bench.earlier_report(path) == report
    others = replace(report, settings={**report.settings, "transformers": "4.0"})
    elsewhere = replace(report, environment=replace(HERE, device="another GPU"))
    for each in (others, elsewhere):
        path.write_text(each.to_json())
        with pytest.raises(ValueError, match="another device, version or size"):
            bench.earlier_report(path)
