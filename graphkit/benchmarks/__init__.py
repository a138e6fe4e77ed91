"""Measurements of speculative steps: time, latency, host time, CUDA calls, and their bound."""

from graphkit.benchmarks.api_calls import api_calls
from graphkit.benchmarks.bare_step import BareStep
from graphkit.benchmarks.clocks import device_ms, synchronise, waits
from graphkit.benchmarks.measured_engine import MeasuredEngine, Steps
from graphkit.benchmarks.prompts import pieces
from graphkit.benchmarks.variants import Variant, variants_of

__all__ = [
    "BareStep",
    "MeasuredEngine",
    "Steps",
    "Variant",
    "api_calls",
    "device_ms",
    "pieces",
    "synchronise",
    "variants_of",
    "waits",
]
