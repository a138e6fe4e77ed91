"""``tools/bench/screen.py``: the record that it makes, and what it measures."""

from __future__ import annotations

from graphkit.records import BenchReport


def test_the_record_repeats_a_graph_as_further_layers_that_run_later(bench):
    graph = bench.large_record(300)
    assert len(graph.nodes) == 352
    graph.check_contents()
    starts = [node.start_us for node in graph.nodes]
    assert starts == sorted(starts)
    assert len({node.module for node in graph.nodes}) > 80


def test_opening_and_every_act_are_measured(bench, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(bench, "NUM_NODES", 100)
    out = tmp_path / "screen.json"
    assert bench.main(["--rounds", "1", "--out", str(out)]) == 0
    report = BenchReport.from_json(out.read_text())
    assert [each.name for each in report.measures] == ["open", *bench.ACTS]
    assert all(measure.value > 0 for measure in report.measures)
    assert report.settings["nodes"] == 176
    assert "open" in capsys.readouterr().out
