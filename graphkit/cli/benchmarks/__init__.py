"""Measurements of speculative steps: time, latency, host time, CUDA calls, and their bound."""

from graphkit.cli.benchmarks.formats import compare_formats
from graphkit.cli.benchmarks.measured_engine import (
    Generation,
    MeasuredEngine,
    Steps,
    Variant,
    make_variants,
)
from graphkit.cli.benchmarks.step_bench import StepBench, longest_path, pieces
from graphkit.cli.benchmarks.step_bound import WeightBytes, copy_bandwidth
from graphkit.cli.benchmarks.timing import api_calls, device_ms, synchronise

__all__ = [
    "Generation",
    "MeasuredEngine",
    "StepBench",
    "Steps",
    "Variant",
    "WeightBytes",
    "api_calls",
    "compare_formats",
    "copy_bandwidth",
    "device_ms",
    "longest_path",
    "make_variants",
    "pieces",
    "synchronise",
]
