"""The graphs of a record by name, and those that somebody asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from graphkit.errors import ConfigError
from graphkit.records import CaptureRecord, GraphRecord, RecordWithGraphs, graphs_of
from graphkit.views.figures import listed

Titled = tuple[str, GraphRecord]
"""A graph and its name, which no other graph of the record has."""


def titled(record: RecordWithGraphs) -> tuple[Titled, ...]:
    """All graphs; those that share a name are counted."""
    seen: Counter[str] = Counter()
    found = []
    for graph in graphs_of(record):
        name = graph.name or "graph"
        seen[name] += 1
        found.append((name if seen[name] == 1 else f"{name} #{seen[name]}", graph))
    return tuple(found)


def selected(
    record: RecordWithGraphs, *, mode: str | None = None, batch_size: int | None = None
) -> tuple[Titled, ...]:
    """The graphs of a mode, of a size, or of both; a graph's name may stand for a mode.

    Returns:
        Empty if the record has that mode and size, but was made without looking into graphs.

    Raises:
        ConfigError: The record has no such mode or size.
    """
    check(record, mode, batch_size)
    return tuple(
        (title, graph)
        for title, graph in titled(record)
        if is_mode(mode, graph.mode, title) and batch_size in (None, graph.batch_size)
    )


def narrowed(record: RecordWithGraphs, graphs: Sequence[Titled]) -> RecordWithGraphs:
    """The record with these of its graphs alone."""
    if isinstance(record, GraphRecord):
        return record
    return replace(record, graphs=tuple(graph for _, graph in graphs))


def check(record: RecordWithGraphs, mode: str | None, batch_size: int | None) -> None:
    """Refuse a mode or a size that the record has not.

    Raises:
        ConfigError: It says what there is.
    """
    places = list(_places(record))
    if mode is not None and not any(is_mode(mode, *names) for names, _ in places):
        known = dict.fromkeys(next(filter(None, names), "") for names, _ in places)
        raise ConfigError(
            f"no mode {mode!r} in this record: {listed(list(known)) or 'nothing'}. "
            "Choose one of those.",
            field="mode",
        )
    sizes = {size: None for names, size in places if size and is_mode(mode, *names)}
    if batch_size is not None and batch_size not in sizes:
        raise ConfigError(
            f"no batch size {batch_size} of {mode or 'any mode'} in this record: "
            f"{listed([str(size) for size in sizes]) or 'none'}. Choose one of those.",
            field="batch_size",
        )


def is_mode(wanted: str | None, *names: str) -> bool:
    """Whether nothing or one of the names is wanted; case does not matter."""
    return wanted is None or wanted.casefold() in (name.casefold() for name in names)


def _places(record: RecordWithGraphs) -> Iterator[tuple[Sequence[str], int]]:
    """The names that stand for a mode, and a size of it; 0 for none."""
    if isinstance(record, CaptureRecord):
        for mode in record.modes:
            yield (mode.mode,), 0
            yield from (((mode.mode,), size.batch_size) for size in mode.sizes)
    yield from (((graph.mode, title), graph.batch_size) for title, graph in titled(record))
