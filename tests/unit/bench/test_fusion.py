"""``tools/bench/fusion.py`` on the CPU: the report names every forward and both sizes."""

from __future__ import annotations

from graphkit.records import BenchReport


def test_every_forward_is_measured_at_each_size(bench, tmp_path, monkeypatch):
    out = tmp_path / "fusion.json"
    monkeypatch.setattr(bench, "REPLAYS", 1)
    arguments = ["--shape", "tiny", "--device", "cpu", "--rounds", "1", "--out", str(out)]
    assert bench.main(arguments) == 0
    nodes = {
        (each.setting, each.variant): each.value
        for each in BenchReport.from_json(out.read_text()).measures
        if each.name == "nodes"
    }
    assert len(nodes) == 4
    for size in bench.BATCH_SIZES:
        setting = f"batch {size}"
        assert nodes[setting, bench.PLAIN] > 1.5 * nodes[setting, bench.FUSED]
