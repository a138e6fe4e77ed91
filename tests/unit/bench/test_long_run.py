"""``tools/bench/long_run.py``: nothing grows, and all counters pass 2**31."""

from __future__ import annotations

import json

import pytest

pytestmark = pytest.mark.slow


def test_a_long_run_loses_and_keeps_nothing(bench, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench, "RUNNING", 16)
    monkeypatch.setattr(bench, "SLOTS", 150)
    monkeypatch.setattr(bench, "IN_SYSTEM", 40)
    monkeypatch.setattr(bench, "PARTS", 3)
    out = tmp_path / "long_run.json"
    assert bench.main(["--requests", "900", "--device", "cpu", "--out", str(out)]) == 0
    found = {}
    for measure in json.loads(out.read_text())["measures"]:
        found.setdefault(measure["setting"], {})[measure["name"]] = measure["value"]
    assert set(found) == {"v1", "v2", "v3"}
    for counts in found.values():
        assert counts["wrong texts"] == counts["rows and slots held"] == 0
        assert counts["more device memory"] == 0
        assert counts["steps past 2**31"] > 0
        assert counts["ended: aborted"] > 0
        assert counts["ended: failed"] > 0
        assert sum(n for name, n in counts.items() if name.startswith("ended")) == 300
    assert sum(counts["preemptions"] for counts in found.values()) > 0
    assert sum(counts["interrupted steps"] for counts in found.values()) > 0
    assert "wrong texts" in capsys.readouterr().out
