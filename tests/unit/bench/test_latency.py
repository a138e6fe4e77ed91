"""``tools/bench/latency.py``: times of all kinds of tokens, on a device."""

from __future__ import annotations

import json

import pytest

from graphkit.errors import DeviceError


@pytest.mark.slow
def test_times_of_a_burst(bench, tmp_path, monkeypatch, capsys):
    small = {"RUNNING": 4, "CONTEXT": 200, "BUDGET": 32, "SHORT": 3, "LONG": 90, "NEW": 4}
    for name, value in small.items():
        monkeypatch.setattr(bench, name, value)
    out = tmp_path / "latency.json"
    assert bench.main(["--rounds", "2", "--device", "cpu", "--out", str(out)]) == 0
    body = json.loads(out.read_text())
    assert body["settings"]["bursts"] == 2
    found = {(each["setting"], each["name"], each["variant"]) for each in body["measures"]}
    names = ("first token, long prompt", "first token, short prompt", "between tokens")
    assert found == {(g, n, p) for g in ("v2", "v3") for n in names for p in ("p50", "p99")}
    assert all(each["value"] > 0 for each in body["measures"])
    assert "between tokens" in capsys.readouterr().out


def test_a_device_that_is_missing_is_refused(bench):
    with pytest.raises(DeviceError):
        bench.main(["--rounds", "1", "--device", "cuda:77"])
