"""Text of numbers and names from records, their facts, and the two shapes of rich tables."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from rich.table import Table
from rich.text import Text

from graphkit.records import AuditReport, GraphRecord, RecordWithGraphs, count_of, figure_name
from graphkit.views.module_tree import total_us

PROFILED = (
    "Times of nodes and gaps were measured in profiled replays, which take longer, above all in "
    "the gaps."
)
_EIGHTHS = " ▏▎▍▌▋▊▉"
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""C0, C1 and delete, without newline and tab: a terminal obeys them."""


def us(value: float | None) -> str:
    """Return microseconds as text; ``-`` if they were not measured."""
    return number(value, ",.2f")


def number(value: float | None, spec: str) -> str:
    """Return a number in a format; ``-`` if there is none."""
    return "-" if value is None else format(value, spec)


def within_one(share: float) -> float:
    """Return a share between 0 and 1; 0 for NaN."""
    return min(1.0, max(0.0, share))  # in this order: NaN is not more than 0.0


def size(num_bytes: float) -> str:
    """Return a number of bytes with its unit, such as ``1.5 KiB``."""
    for unit in ("bytes", "KiB", "MiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:,.0f} bytes" if unit == "bytes" else f"{num_bytes:,.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:,.1f} GiB"


def bar(share: float, width: int) -> str:
    """Return a share of one as a bar of at most ``width`` cells; NaN has none."""
    full, rest = divmod(round(within_one(share) * width * 8), 8)
    return "█" * full + _EIGHTHS[rest].strip()


def visible(text: str) -> str:
    r"""Return the text with control characters written out, such as ``\x1b``."""
    return _CONTROLS.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


def plain(text: str) -> str:
    """Return a record's text as one line that a terminal, a file and XML accept.

    Control characters and surrogates are written out.
    """
    if text.isascii() and text.isprintable():
        return text
    spaced = " ".join(text.replace("\t", " ").splitlines())
    return visible(spaced).encode("utf-8", "backslashreplace").decode("utf-8")


def facts_table(facts: Iterable[tuple[str, str]]) -> Table:
    """Return names and texts side by side; long texts fold."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in facts:
        table.add_row(Text(plain(name)), Text(plain(text)))
    return table


def text_table(left: Sequence[str], right: Sequence[str] = (), title: str = "") -> Table:
    """Return an empty table with columns of text, then of numbers; narrow columns fold."""
    table = Table(
        title=Text(title, style="bold") if title else None,
        title_justify="left",
        title_style="",
        box=None,
        pad_edge=False,
        padding=(0, 2, 0, 0),
        header_style="",
    )
    for name in left:
        table.add_column(name, overflow="fold")
    for name in right:
        table.add_column(name, overflow="fold", justify="right")
    return table


def environment_facts(record: RecordWithGraphs | AuditReport) -> Iterator[tuple[str, str]]:
    """Yield the device, the backend and the versions, as far as they are known."""
    environment = record.environment
    yield "device", environment.device
    yield "backend", record.backend
    for name in ("torch", "triton", "cuda", "driver", "graphkit"):
        if getattr(environment, name):
            yield name, getattr(environment, name)


def time_facts(graph: GraphRecord) -> Iterator[tuple[str, str]]:
    """Yield what was measured of a graph, the most important first.

    Only ``unprofiled`` is a time without the profiler. ``the profiler adds`` says how much longer
    the median profiled replay took. Busy time and gaps are sums over the page's nodes.
    """
    timing, timeline = graph.timing, graph.timeline
    if timing is None:
        yield "times", "not measured"
        return
    unprofiled = timing.unprofiled_us
    yield figure_name("unprofiled_us"), _time(unprofiled)
    yield "profiled", f"p50 {_time(timing.p50_us)}, p95 {_time(timing.p95_us)}"
    if unprofiled is not None and timing.p50_us > unprofiled:
        yield "the profiler adds", _time(timing.p50_us - unprofiled)
    share = f" ({timeline.gap_us / timeline.end_us:.0%})" if timeline.end_us > 0 else ""
    yield figure_name("busy_us"), _time(timeline.busy_us)
    yield figure_name("gap_us"), f"{_time(timeline.gap_us)}{share}"


def graph_facts(graph: GraphRecord) -> Iterator[tuple[str, str]]:
    """Yield name and text of what is known of a whole graph, the most important first."""
    yield "nodes", f"{len(graph.nodes):,}"
    yield from time_facts(graph)
    if graph.memory:
        memory = f"{size(graph.memory.graph_bytes)} in a pool of {size(graph.memory.pool_bytes)}"
        yield "memory", memory
    if graph.captured_at:
        yield "captured at", graph.captured_at
    kinds = Counter(node.kind for node in graph.nodes).most_common()
    if kinds:
        yield "kinds", ", ".join(f"{count:,} {kind}" for kind, count in kinds)
    timing, whole = graph.timing, total_us(graph.nodes)
    if timing:
        path = count_of(len(timing.critical_path), "node")
        yield figure_name("critical_us"), f"{_time(timing.critical_us)}, {path}"
    if whole is not None:
        yield "sum of nodes", _time(whole)
    if timing:
        yield "profiled replays", f"{timing.replays:,}"
    programmatic = sum(edge.kind == "programmatic" for edge in graph.edges)
    yield "edges", f"{len(graph.edges):,}, {programmatic:,} programmatic (PDL)"


def _time(value: float | None) -> str:
    return "not measured" if value is None else f"{us(value)} us"
