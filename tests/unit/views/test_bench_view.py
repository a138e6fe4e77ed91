"""A BenchReport as text: a table per setting, its facts, and measures with bars."""

from __future__ import annotations

from rich.console import Console

from graphkit.records import BenchReport, Environment, Measure
from graphkit.views import bench_view

H200 = Environment(
    device="NVIDIA H200", torch="2.11", triton="3.6", cuda="13.0", driver="580", graphkit="0.1"
)


def text_of(*measures, environment=H200):
    report = BenchReport(
        name="steps of [b]", environment=environment, settings={"topk": 1}, measures=measures
    )
    console = Console(width=120)
    with console.capture() as captured:
        console.print(bench_view(report))
    return [line.rstrip() for line in captured.get().splitlines()]


def cell(variant, name, value, unit="", setting="batch 8"):
    return Measure(name=name, value=value, unit=unit, setting=setting, variant=variant)


def test_a_setting_is_a_table_with_a_row_per_variant():
    lines = text_of(
        cell("v2", "time per step", 1.2574, "ms"),
        cell("v2", "tokens", 12345.6, "tokens/s"),
        cell("loop", "time per step", 0.65432, "ms"),
        cell("", "bare step", 0.6367, "ms"),
        cell("", "nodes", 1336),
        cell("v2", "calls", 0.015625, "per step"),
        cell("x", "time per step", 9, "ms", setting="batch 16"),
    )
    assert lines == [
        "steps of [b]",
        "",
        "batch 8",
        "      time per step    tokens     calls",
        "                 ms  tokens/s  per step",
        "v2            1.257    12,346     0.016",
        "loop          0.654",
        "bare step  0.637 ms",
        "nodes      1,336",
        "",
        "batch 16",
        "   time per step",
        "              ms",
        "x              9",
        "",
        "NVIDIA H200, driver 580, torch 2.11, triton 3.6",
        "topk 1",
    ]


def test_the_widest_table_of_a_bench_fits():
    names = {
        "time per step": "ms", "p50": "ms", "p99": "ms", "accept length": "", "tokens": "tokens/s",
        "tokens at accept length 1": "tokens/s", "tokens at 2 accepted": "tokens/s",
        "tokens at accept length 3": "tokens/s", "host": "us", "GPU busy": "",
        "CUDA calls": "per step",
    }  # fmt: skip
    lines = text_of(*(cell("loop of 16", name, 1234.5678, unit) for name, unit in names.items()))
    assert any(line.split() == ["loop", "of", "16", *["1,235"] * len(names)] for line in lines)


def test_measures_without_a_setting_are_shown_with_their_bars():
    lines = text_of(
        Measure(name="over [v2]", value=0.6, unit="x", bar=0.5),
        Measure(name="host", value=float("nan"), unit="us", bar=2.0),
        Measure(name="other", value=1e300, unit=""),
    )
    assert lines[2] == "over [v2]  0.600 x, <= 0.500 x: missed"
    assert lines[3] == "host       nan us, <= 2 us: missed"
    assert lines[4].startswith("other ")


def test_there_is_no_column_of_bars_without_bars():
    lines = text_of(Measure(name="copy", value=2, unit="GB/s"))
    assert "bar" not in " ".join(lines)
    assert any("2 GB/s" in line for line in lines)


def test_a_report_of_the_recorder_says_what_its_times_mean():
    cpu = Environment(device="cpu", torch="2.13", triton="", cuda="", driver="", graphkit="0.1")
    lines = text_of(environment=cpu)
    assert "cpu, torch 2.13" in lines
    assert lines[-1].endswith("times say nothing about a GPU.")
