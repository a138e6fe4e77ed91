"""Measurements of speculative steps: time, latency, host time, CUDA calls, and their bound."""

from graphkit.cli.benchmarks.api_calls import api_calls
from graphkit.cli.benchmarks.clocks import device_ms, synchronise
from graphkit.cli.benchmarks.formats import compare_formats
from graphkit.cli.benchmarks.measured_engine import MeasuredEngine, Steps
from graphkit.cli.benchmarks.open_engine import longest_path, pieces
from graphkit.cli.benchmarks.step_bench import StepBench
from graphkit.cli.benchmarks.variants import Generation, Variant, make_variants
from graphkit.cli.benchmarks.weight_bytes import WeightBytes, copy_bandwidth

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
