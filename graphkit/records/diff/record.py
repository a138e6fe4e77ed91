"""What changed between two records."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import ClassVar

from graphkit.records.capture import CaptureRecord, SizeRecord
from graphkit.records.diff.graphs import Figure, GraphDiff, changed_figures, diff_graphs
from graphkit.records.diff.match import Matched, match_graphs
from graphkit.records.diff.nodes import Change, changed
from graphkit.records.graph import GraphRecord
from graphkit.records.graphed import Graphed, backend_of, graphed, graphs_of, title_of
from graphkit.records.json_text import Record

_Sizes = dict[str, tuple[str, SizeRecord]]
"""By name; with the mode."""
_FIGURES = ("num_tokens", "num_nodes", "capture_ms", "pool_bytes", "replay_us", "eager_us")


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeDiff:
    """A captured size whose figures changed.

    Attributes:
        mode: The forward mode's name.
        batch_size: The size.
        figures: Those that changed.
    """

    mode: str
    batch_size: int
    figures: tuple[Figure, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffRecord(Record):
    """What changed between two records.

    Attributes:
        before, after: What they are of: a target, a command or a graph.
        environment: What changed about where they were made.
        sizes: Captured sizes of both whose figures changed.
        graphs: Graphs of both, changed or not.
        only_before, only_after: Names of sizes and graphs that the other one lacks.
    """

    KIND: ClassVar[str] = "diff"
    before: str
    after: str
    environment: tuple[Change, ...]
    sizes: tuple[SizeDiff, ...]
    graphs: tuple[GraphDiff, ...]
    only_before: tuple[str, ...]
    only_after: tuple[str, ...]


def diff_records(before: Record, after: Record) -> DiffRecord:
    """What changed between two records, of one kind or not.

    Graphs of runners belong together by mode and size; others by name, by the line that captured
    them, or by order. Two records of one graph each are always compared.

    Raises:
        RecordError: A record is of a kind that holds no graphs.
    """
    first, second = graphed(before), graphed(after)
    matched = _matched(first, second)
    sizes = _sizes(first), _sizes(second)
    return DiffRecord(
        before=title_of(first),
        after=title_of(second),
        environment=tuple(changed(_environment(first), _environment(second))),
        sizes=tuple(_size_diffs(*sizes)),
        graphs=tuple(diff_graphs(*pair) for pair in matched.pairs),
        only_before=_only(sizes[0], sizes[1], matched.only_before),
        only_after=_only(sizes[1], sizes[0], matched.only_after),
    )


def _matched(before: Graphed, after: Graphed) -> Matched:
    if isinstance(before, GraphRecord) and isinstance(after, GraphRecord):
        return Matched(((before, after),))
    return match_graphs(graphs_of(before), graphs_of(after))


def _environment(record: Graphed) -> dict[str, str]:
    return {"backend": backend_of(record)} | asdict(record.environment)


def _sizes(record: Graphed) -> _Sizes:
    modes = record.modes if isinstance(record, CaptureRecord) else ()
    return {f"{m.mode} {size.batch_size}": (m.mode, size) for m in modes for size in m.sizes}


def _size_diffs(before: _Sizes, after: _Sizes) -> Iterator[SizeDiff]:
    for name, (mode, size) in after.items():
        if name in before:
            figures = changed_figures(*(_figures(each) for each in (before[name][1], size)))
            if figures:
                yield SizeDiff(mode=mode, batch_size=size.batch_size, figures=figures)


def _figures(size: SizeRecord) -> dict[str, float | None]:
    return {name: getattr(size, name) for name in _FIGURES}


def _only(these: _Sizes, others: _Sizes, graphs: tuple[GraphRecord, ...]) -> tuple[str, ...]:
    """Names of sizes, and of graphs; of the nodes alone where the other has that size."""
    sizes = [name for name in these if name not in others]
    inside = [f"nodes of {g.name}" if g.name in others else g.name for g in graphs]
    return tuple(dict.fromkeys([*sizes, *inside]))
