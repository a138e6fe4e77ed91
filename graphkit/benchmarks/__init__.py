"""Measurements of speculative steps: time, latency, host time, CUDA calls, and their bound."""

from graphkit.benchmarks.api_calls import api_calls
from graphkit.benchmarks.clocks import device_ms, synchronise
from graphkit.benchmarks.formats import compare_formats
from graphkit.benchmarks.measured_engine import MeasuredEngine, Steps
from graphkit.benchmarks.open_engine import longest_path, pieces
from graphkit.benchmarks.step_bench import StepBench
from graphkit.benchmarks.variants import Generation, Variant, make_variants
from graphkit.benchmarks.weight_bytes import WeightBytes, copy_bandwidth

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
