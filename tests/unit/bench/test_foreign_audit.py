"""``tools/bench/foreign_audit.py`` on the stand-in device: every check is done and measured."""

from __future__ import annotations

from graphkit.records import BenchReport


def test_the_report_measures_replays_and_checks(bench, tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "CALLS", 3)
    out = tmp_path / "foreign_audit.json"
    arguments = ["--device", "cpu", "--nodes", "6", "--gigabytes", "0.002", "--rounds", "1"]
    assert bench.main([*arguments, "--out", str(out)]) in (0, 1)  # its bars are those of a GPU
    measures = BenchReport.from_json(out.read_text()).measures
    found = {(each.name, each.variant): each.value for each in measures}
    assert found["nodes", ""] == 7
    assert found["checks not done", ""] == found["errors", ""] == 0
    for variant in ("no audit", "audit"):
        assert {("capture", variant), ("host", variant), ("replay", variant)} <= found.keys()
    assert ("capture", "audit, known memory") in found
    assert {("first check", ""), ("one check", "")} <= found.keys()
