"""``tools/bench/model_kinds.py``: reports that are measured in several runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from graphkit.records import Environment, Measure

HERE = Environment(device="a GPU", torch="2", triton="3", cuda="13", driver="580", graphkit="0.2.0")


@pytest.fixture(autouse=True)
def _on_a_gpu(bench, monkeypatch):
    monkeypatch.setattr(bench, "environment", lambda _: HERE)


def report_of(bench, *cells, failures=""):
    measures = tuple(
        Measure(name="tokens per second", value=1.0, unit="1/s", setting=setting, variant=variant)
        for setting, variant in cells
    )
    empty = bench.empty_report()
    return replace(empty, measures=measures, settings={**empty.settings, "failures": failures})


def test_kinds_that_are_not_complete_are_measured_again(bench, tmp_path):
    path, last = tmp_path / "model_kinds.json", bench._LAST_WAY
    whole = ("llama, 1 requests", last), ("llama, 8 requests", last)
    others = ("opt, 1 requests", last), ("gemma2, 8 requests", "generate, static cache")
    failures = "llama, 1 requests, generate: Error: 0 tokens", "opt: stopped after 150 s"
    path.write_text(report_of(bench, *whole, *others, failures="; ".join(failures)).to_json())
    earlier = bench.earlier_report(path)
    assert bench.complete_kinds(earlier) == {"llama"}
    assert earlier == report_of(bench, *whole, failures=failures[0])


def test_results_are_added_to_those_of_an_earlier_report(bench, monkeypatch):
    printed = '{"setting": "opt, 1 requests", "variant": "a way", "value": 2.0}\nno result'
    ended = [(printed, "opt: exit code 1")]
    monkeypatch.setattr(bench, "run_kinds", lambda *_: iter(ended))
    earlier = report_of(bench, ("llama, 1 requests", "a way"), failures="llama: exit code 1")
    found = bench.report(["opt"], 1, 1.0, None, earlier)
    assert [each.setting for each in found.measures] == ["llama, 1 requests", "opt, 1 requests"]
    assert found.settings["failures"] == "llama: exit code 1; opt: exit code 1"


@pytest.mark.parametrize("changed", [{"transformers": "4.0"}, {"layers": 99}])
def test_reports_of_other_versions_and_sizes_are_refused(bench, tmp_path, changed):
    path, report = tmp_path / "model_kinds.json", report_of(bench)
    path.write_text(replace(report, settings={**report.settings, **changed}).to_json())
    with pytest.raises(ValueError, match="another device, version or size"):
        bench.earlier_report(path)


def test_a_report_of_another_device_is_refused(bench, tmp_path):
    path = tmp_path / "model_kinds.json"
    elsewhere = replace(HERE, device="another GPU")
    path.write_text(replace(report_of(bench), environment=elsewhere).to_json())
    with pytest.raises(ValueError, match="another device, version or size"):
        bench.earlier_report(path)
