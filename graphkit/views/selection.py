"""The graphs of a record by name, and the selection of some of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from graphkit.errors import ConfigError
from graphkit.records import CaptureRecord, GraphRecord, RecordWithGraphs, listed

NamedGraph = tuple[str, GraphRecord]
"""A graph and its name, unique in the record."""


def named_graphs(record: RecordWithGraphs) -> tuple[NamedGraph, ...]:
    """Return all graphs of a record; equal names are numbered."""
    seen: Counter[str] = Counter()
    named = []
    for graph in record.graphs:
        name = graph.name or "graph"
        seen[name] += 1
        named.append((name if seen[name] == 1 else f"{name} #{seen[name]}", graph))
    return tuple(named)


def select_graphs(
    record: RecordWithGraphs, *, mode: str | None = None, batch_size: int | None = None
) -> tuple[NamedGraph, ...]:
    """Return the graphs of a mode, a size, or both.

    Args:
        record: A record of a capture, of a foreign program or of a graph.
        mode: A forward mode in any case, or the name of a graph; ``None`` for all.
        batch_size: A captured size; ``None`` for all.

    Returns:
        Empty if the record has that mode and size, but holds no nodes of it.

    Raises:
        ConfigError: The record has no such mode or size.
    """
    _check(record, mode, batch_size)
    return tuple(
        (name, graph)
        for name, graph in named_graphs(record)
        if is_mode(mode, graph.mode, name) and batch_size in (None, graph.batch_size)
    )


def with_only(record: RecordWithGraphs, graphs: Sequence[NamedGraph]) -> RecordWithGraphs:
    """Return the record with only these of its graphs."""
    if isinstance(record, GraphRecord):
        return record
    return replace(record, graphs=tuple(graph for _, graph in graphs))


def is_mode(wanted: str | None, *names: str) -> bool:
    """Return True if ``wanted`` is ``None`` or one of the names, in any case."""
    return wanted is None or wanted.casefold() in (name.casefold() for name in names)


def _check(record: RecordWithGraphs, mode: str | None, batch_size: int | None) -> None:
    known = list(_known(record))
    if mode is not None and not any(is_mode(mode, *names) for names, _ in known):
        modes = dict.fromkeys(next(filter(None, names), "") for names, _ in known)
        raise ConfigError(
            f"no mode {mode!r} in this record: {listed(modes) or 'it has no modes'}. "
            "Choose one of those.",
            field="mode",
        )
    sizes = {size: None for names, size in known if size and is_mode(mode, *names)}
    if batch_size is not None and batch_size not in sizes:
        raise ConfigError(
            f"no batch size {batch_size} of {mode or 'any mode'} in this record: "
            f"{listed(map(str, sizes)) or 'none'}. Choose one of those.",
            field="batch_size",
        )


def _known(record: RecordWithGraphs) -> Iterator[tuple[Sequence[str], int]]:
    """Yield the names of each mode with each of its sizes, or 0 for none."""
    if isinstance(record, CaptureRecord):
        for mode in record.modes:
            yield (mode.mode,), 0
            yield from (((mode.mode,), size.batch_size) for size in mode.sizes)
    yield from (((graph.mode, name), graph.batch_size) for name, graph in named_graphs(record))
