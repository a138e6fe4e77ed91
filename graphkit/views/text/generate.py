"""Facts of a GenerateRecord as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from rich.console import RenderableType

from graphkit.records import GenerateRecord, count_of
from graphkit.views.formatting import facts_table


def generate_view(record: GenerateRecord) -> RenderableType:
    """Return settings, speed, replays by mode, and fallbacks with their reasons."""
    return facts_table(_facts(record))


def _facts(record: GenerateRecord) -> Iterator[tuple[str, str]]:
    sampling = "".join(f", {name} {value:g}" for name, value in _sampling(record))
    drafts = f"topk {record.topk}, num_steps {record.num_steps}"
    drafts += f", num_draft_tokens {record.num_draft_tokens}"
    yield "algorithm", f"{record.algorithm}, {drafts}, {record.generation}{sampling}"
    where = record.environment
    yield "device", f"{where.device}, {record.backend} backend, torch {where.torch}"
    yield "output", f"{record.new_tokens} tokens in {record.seconds:.2f} s"
    yield "ended by", _finish_reasons(record)
    yield "speed", f"{record.tokens_per_second:.1f} tokens/s"
    yield "accept length", f"{record.accept_length:.2f}" if record.accept_length else "-"
    if record.accepted_lengths:
        yield "accepted", _counts(record.accepted_lengths, "token")
    if len(record.drafted_lengths) > 1:
        yield "drafted", _counts(record.drafted_lengths, "draft")
    if record.acceptance:
        yield "by position", ", ".join(f"{share:.0%}" for share in record.acceptance)
    if record.gain_over_plain:
        yield "over plain", f"{record.gain_over_plain:.2f} x the speed of plain decoding"
    if record.capture_seconds is not None:
        yield "capture", f"{record.capture_seconds:.2f} s"
    replays = [f"{m}: {count_of(n, 'replay')}" for m, n in record.replays.items() if n]
    fallbacks = [
        f"{mode}: {count_of(count, 'run')}, {reason}"
        for mode, reasons in record.fallbacks.items()
        for reason, count in reasons.items()
    ]
    for name, texts in (("graphs", replays), ("without a graph", fallbacks)):
        first, *others = texts or ["none"]
        yield name, first
        yield from (("", text) for text in others)


def _sampling(record: GenerateRecord) -> Iterator[tuple[str, float]]:
    """Yield the sampling parameters that have an effect."""
    filters = {"temperature": 0, "top_k": 0, "top_p": 1, "min_p": 0} if record.temperature else {}
    processors = {"repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0}
    for name, neutral in {**filters, **processors, "min_tokens": 0}.items():
        value = getattr(record, name)
        if value != neutral and not (name == "top_k" and value < 0):
            yield name, value


def _finish_reasons(record: GenerateRecord) -> str:
    reasons = Counter(completion.finish_reason for completion in record.completions)
    if len(record.completions) == 1:
        return next(iter(reasons))
    return ", ".join(f"{reason} ({count})" for reason, count in reasons.items())


def _counts(lengths: Mapping[int, int], noun: str) -> str:
    """Return how many verify steps accepted or verified how many."""
    return ", ".join(f"{count_of(length, noun)}: {count}x" for length, count in lengths.items())
