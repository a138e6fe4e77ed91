"""Measures of the report of a ``StepBench``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from graphkit.cli.benchmarks.measured_engine import Steps
from graphkit.cli.benchmarks.weight_bytes import WeightBytes
from graphkit.records import Measure

VERIFY_WEIGHTS, DRAFT_WEIGHTS = "weights read by verify", "weights read by drafts"
"""Names of the measures of ``weight_measures``."""
TIME_PER_STEP, BARE_STEP = "time per step", "bare step"
BOUND, OVER_BOUND = "weights at the copy bandwidth", "bare step over that"
"""Names of the measures that formats are compared by."""


def cell(setting: str, variant: str, name: str, value: float, unit: str = "") -> Measure:
    """Return the measure of one variant in one setting: a cell of the report's tables."""
    return Measure(name=name, value=value, unit=unit, setting=setting, variant=variant)


def setting_name(batch_size: int) -> str:
    """Return the name of the setting of a batch size."""
    return f"batch {batch_size}"


def step_measures(
    batch_size: int, variant: str, steps: Steps, accept_lengths: Sequence[float]
) -> Iterator[Measure]:
    """Yield time, latency and speed of measured steps.

    Args:
        batch_size: Requests of the steps.
        variant: How the steps ran, such as ``v2``.
        steps: The measured steps.
        accept_lengths: Tokens per step and request at which to give the speed, too. A step takes
            the same time whatever it accepts.
    """
    setting = setting_name(batch_size)
    yield cell(setting, variant, TIME_PER_STEP, steps.ms_per_step, "ms")
    yield cell(setting, variant, "p50", steps.latency_ms(50), "ms")
    yield cell(setting, variant, "p99", steps.latency_ms(99), "ms")
    yield cell(setting, variant, "accept length", steps.tokens_per_step / batch_size)
    yield cell(setting, variant, "tokens", steps.tokens_per_second, "tokens/s")
    for length in accept_lengths:
        speed = batch_size * length / steps.ms_per_step * 1e3
        yield cell(setting, variant, f"tokens at accept length {length:g}", speed, "tokens/s")


def length_measures(
    batch_size: int, variant: str, steps: Steps, lengths: Iterable[int]
) -> Iterator[Measure]:
    """Yield the share of each draft length in measured steps.

    Args:
        batch_size: Requests of the steps.
        variant: How the steps ran.
        steps: The measured steps.
        lengths: Drafts that a step may verify for a request.
    """
    drafted = steps.drafted_lengths
    for drafts in lengths:
        share = drafted[drafts] / drafted.total()
        yield cell(setting_name(batch_size), variant, f"steps of {drafts} drafts", share)


def node_measures(batch_size: int, nodes: Mapping[str, int]) -> Iterator[Measure]:
    """Yield the counts of ``BareStep.nodes``: all nodes, and those outside of the models."""
    for name in ("nodes", "own nodes"):
        yield cell(setting_name(batch_size), "", name, nodes[name])


def bound_measures(
    batch_size: int, bare_ms: float, weights: WeightBytes, bandwidth: float
) -> Iterator[Measure]:
    """Yield the time to read the weights of a step, and the time of the bare step over it.

    Args:
        batch_size: Requests of the step.
        bare_ms: Milliseconds per bare step.
        weights: Bytes that a step reads.
        bandwidth: Bytes per second of a copy.
    """
    setting, bound_ms = setting_name(batch_size), weights.total / bandwidth * 1e3
    yield cell(setting, "", "copy bandwidth", bandwidth / 1e9, "GB/s")
    yield cell(setting, "", BOUND, bound_ms, "ms")
    yield cell(setting, "", OVER_BOUND, bare_ms / bound_ms, "x")


def weight_measures(weights: WeightBytes) -> Iterator[Measure]:
    """Yield the bytes of weights that a step reads; they are the same at any batch size."""
    yield Measure(name=VERIFY_WEIGHTS, value=weights.verify / 1e6, unit="MB")
    yield Measure(name=DRAFT_WEIGHTS, value=weights.drafts / 1e6, unit="MB")
