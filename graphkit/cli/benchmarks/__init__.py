"""Measurements of speculative steps: time, latency, and the bound of their weights."""

from graphkit.cli.benchmarks.measured_engine import (
    Generation,
    MeasuredEngine,
    Steps,
    Variant,
    make_variants,
)
from graphkit.cli.benchmarks.step_bench import StepBench, longest_path, pieces
from graphkit.cli.benchmarks.step_bound import WeightBytes, copy_bandwidth, device_ms, synchronise

__all__ = [
    "Generation",
    "MeasuredEngine",
    "StepBench",
    "Steps",
    "Variant",
    "WeightBytes",
    "copy_bandwidth",
    "device_ms",
    "longest_path",
    "make_variants",
    "pieces",
    "synchronise",
]
