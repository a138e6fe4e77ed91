"""What a model wrote, and the facts of a GenerateRecord, as people see them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from graphkit.records import GenerateRecord

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""C0 and C1 and delete, without newline and tab: what a terminal obeys instead of showing it."""


def visible(text: str) -> str:
    r"""The text with control characters written out, such as ``\x1b``."""
    return _CONTROLS.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def generate_view(record: GenerateRecord) -> RenderableType:
    """How it was made and how fast, which graphs ran, and what ran without one."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, fact in _facts(record):
        table.add_row(Text(name), Text(fact))  # as Text: a device may have brackets in its name
    return table


def _facts(record: GenerateRecord) -> Iterator[tuple[str, str]]:
    yield "algorithm", _settings(record)
    yield "device", _place(record)
    yield "output", f"{record.new_tokens} tokens in {record.seconds:.2f} s"
    yield "ended by", _ends(record)
    yield "speed", f"{record.tokens_per_second:.1f} tokens/s"
    yield "accept length", f"{record.accept_length:.2f}" if record.accept_length else "-"
    if record.capture_seconds is not None:
        yield "capture", f"{record.capture_seconds:.2f} s"
    yield "graphs", "\n".join(_replays(record)) or "none"
    yield "without a graph", "\n".join(_fallbacks(record)) or "none"


def _settings(record: GenerateRecord) -> str:
    temperature = f", temperature {record.temperature:g}" if record.temperature else ""
    return (
        f"{record.algorithm}, topk {record.topk}, num_steps {record.num_steps}, "
        f"num_draft_tokens {record.num_draft_tokens}, {record.generation}{temperature}"
    )


def _place(record: GenerateRecord) -> str:
    facts = record.environment
    return f"{facts.device}, {record.backend} backend, torch {facts.torch}"


def _ends(record: GenerateRecord) -> str:
    reasons = Counter(completion.finish_reason for completion in record.completions)
    if len(record.completions) == 1:
        return next(iter(reasons))
    return ", ".join(f"{reason} ({count})" for reason, count in reasons.items())


def _replays(record: GenerateRecord) -> Iterator[str]:
    for mode, count in record.replays.items():
        if count:
            yield f"{mode}: {_times(count, 'replay')}"


def _fallbacks(record: GenerateRecord) -> Iterator[str]:
    for mode, reasons in record.fallbacks.items():
        for reason, count in reasons.items():
            yield f"{mode}: {_times(count, 'run')}, {reason}"


def _times(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
