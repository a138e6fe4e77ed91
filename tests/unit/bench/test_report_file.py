"""``--out`` of the scripts is checked before they measure, and keeps an older result until then."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[3] / "tools" / "bench"
SCRIPTS = [
    path.stem
    for path in sorted(BENCH.glob("*.py"))
    if "def main(" in (text := path.read_text()) and ("add_out(" in text or "publish(" in text)
]


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_path_that_cannot_be_written_is_refused_before_the_work(
    script, monkeypatch, tmp_path, capsys
):
    monkeypatch.syspath_prepend(BENCH)
    monkeypatch.setattr(sys, "argv", [script, "--out", str(tmp_path / "missing" / "out.json")])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(script).main()
    assert ended.value.code == 2
    assert "missing does not exist. Create the folder first." in capsys.readouterr().err


def test_a_run_that_is_cut_keeps_the_older_result(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(BENCH)
    out = tmp_path / "out.json"
    out.write_text("older")

    def measure(_rounds):
        assert out.read_text() == "older"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        importlib.import_module("timing").publish("Measure.", 1, measure, ["--out", str(out)])
    assert [each.name for each in tmp_path.iterdir()] == ["out.json"]
    assert out.read_text() == "older"
