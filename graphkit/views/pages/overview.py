"""The first view of a capture: modes by sizes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from graphkit.records import CaptureRecord, ModeRecord, SizeRecord
from graphkit.views.figures import count_of, size, us
from graphkit.views.pages.buffers import buffers_link
from graphkit.views.pages.compare import compare_link
from graphkit.views.pages.family import Family, families
from graphkit.views.pages.graph import graph_page
from graphkit.views.pages.memory import memory_link
from graphkit.views.pages.page import Column, Item, Link, Page

_NO_GRAPHS = "the record was made without looking into graphs: graphkit inspect TARGET does"


def overview(record: CaptureRecord) -> Page:
    """Each mode with its sizes: what they hold, what they cost, how often they were replayed."""
    found = families(record)
    return Page(
        title=record.target,
        facts=tuple(_facts(record)),
        columns=_columns(record),
        items=tuple(_mode(mode, record, found) for mode in record.modes),
        opened=frozenset(mode.mode for mode in record.modes),
        empty="no mode was captured",
    )


def _facts(record: CaptureRecord) -> Iterator[str]:
    where = record.environment
    yield where.device
    yield f"{record.backend} backend"
    if record.mismatches:
        wrong = count_of(len(record.mismatches), "row")
        yield f"{wrong} replayed wrong: graphkit capture shows them"
    yield f"torch {where.torch}"
    if where.driver:
        yield f"driver {where.driver}"


def _columns(record: CaptureRecord) -> tuple[Column, ...]:
    count, nodes = "{:,}".format, "nodes" if record.backend == "cuda" else "ops"
    return (
        Column(name="mode and size", least=24),
        Column(name=nodes, show=count, is_number=True, rank=2),
        Column(name="bytes", show=size, is_number=True, rank=3),
        Column(name="ms", show="{:,.1f}".format, is_number=True, rank=6),
        Column(name="replay us", show=us, is_number=True, rank=1),
        Column(name="replays", show=count, is_number=True, rank=5),
        Column(name="padding", show=count, is_number=True, rank=7),
        Column(name="fallbacks", show=count, is_number=True, rank=4),
    )


def _mode(mode: ModeRecord, record: CaptureRecord, found: Sequence[Family]) -> Item:
    stats = mode.stats
    fallbacks = sum(stats.fallbacks.values()) if stats else None
    return Item(
        key=mode.mode,
        values=(
            mode.mode, None, sum(each.pool_bytes for each in mode.sizes),
            sum(each.capture_ms for each in mode.sizes), None,
            stats.replays if stats else None, stats.padded_rows if stats else None, fallbacks,
        ),
        note="; ".join(_remarks(mode)),
        tone="warning" if mode.eager_reason or fallbacks else "",
        inside=partial(_sizes, mode, record, found) if mode.sizes else None,
        links={"buffers": buffers_link(record.modes, mode.mode)},
    )  # fmt: skip


def _remarks(mode: ModeRecord) -> Iterator[str]:
    if mode.eager_reason:
        yield f"stays eager: {mode.eager_reason}"
    if mode.stats is None:
        yield "replays were not counted"
        return
    yield f"{count_of(mode.stats.padded_rows, 'row')} of padding"
    for reason, count in mode.stats.fallbacks.items():
        yield f"fell back {count:,} x: {reason}"


def _sizes(mode: ModeRecord, record: CaptureRecord, found: Sequence[Family]) -> Iterator[Item]:
    for each in mode.sizes:
        replays = mode.stats.replays_by_size.get(each.batch_size, 0) if mode.stats else None
        yield Item(
            key=f"{mode.mode} {each.batch_size}",
            values=(
                f"size {each.batch_size}", each.num_nodes, each.pool_bytes, each.capture_ms,
                each.replay_us, replays, None, None,
            ),
            note=f"{mode.mode} {'; '.join((_checked(each), *_remarks(mode)))}",
            links=_links(record, mode, each, found),
        )  # fmt: skip


def _checked(each: SizeRecord) -> str:
    facts = [f"size {each.batch_size}, {count_of(each.num_tokens, 'row')}"]
    if each.eager_us is not None:
        facts.append(f"{us(each.eager_us)} us without a graph")
    if each.largest_difference is not None:
        facts.append(
            f"largest difference {each.largest_difference:.2g} "
            f"(batches compared: {each.batches_compared:,})"
        )
    return ", ".join(facts)


def _links(
    record: CaptureRecord, mode: ModeRecord, each: SizeRecord, found: Sequence[Family]
) -> dict[str, Link]:
    links: dict[str, Link] = dict.fromkeys(("open", "compare", "memory"), _NO_GRAPHS)
    for family in found:
        for at, (_, graph) in enumerate(family.graphs):
            if (graph.mode, graph.batch_size) == (mode.mode, each.batch_size):
                links["open"] = partial(graph_page, family, at)
                links["compare"] = compare_link(family.graphs, at)
                links["memory"] = memory_link(family.graphs, at)
    return links | {"buffers": buffers_link(record.modes, mode.mode)}
