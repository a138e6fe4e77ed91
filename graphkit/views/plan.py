"""A PlanRecord as text: the chosen list beside the default, and the traffic by captured size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise

from rich.console import Group, RenderableType
from rich.text import Text

from graphkit.records import PlanRecord, count_of
from graphkit.views.formatting import bar, facts_table, number, plain, size, text_table

_BAR = 40


def plan_view(record: PlanRecord) -> RenderableType:
    """Return the sizes, a table of both lists, and a bar per captured size."""
    steps = sum(record.live_sizes.values())
    sizes = list(record.live_sizes)
    parts: list[RenderableType] = [
        Text(_title(record), style="bold"),
        facts_table([
            ("traffic", f"{count_of(steps, 'step')} of {min(sizes)} to {max(sizes)} requests"),
            ("times", f"of {record.mode}" if record.mode else "none: the list has least padding"),
            ("budget", ", ".join(_budget(*limit) for limit in record.budget.items())),
        ]),
        Text(),
    ]  # fmt: skip
    if record.chosen.batch_sizes:
        listed = ",".join(map(str, record.chosen.batch_sizes))
        parts += [Text(f"--batch-sizes {listed}", no_wrap=True, overflow="ignore"), Text()]
    else:
        parts += [Text("No size is worth a graph: every step is faster without."), Text()]
    if record.eager_above:
        parts += [
            Text(
                f"Batches above {record.eager_above} are faster without a graph. Set "
                f"BufferSizes.max_batch_size to {record.eager_above} and call run(), which runs "
                "them so."
            ),
            Text(),
        ]
    return Group(*parts, _lists(record), Text(), *_traffic(record))


def _title(record: PlanRecord) -> str:
    chosen, default = record.chosen, record.default
    if chosen.step_us is not None and default.step_us is not None:
        what, one, other = "us per step", chosen.step_us, default.step_us
    else:
        what, one, other = "pad requests per replay", chosen.padding, default.padding
    sizes = count_of(len(chosen.batch_sizes), "size")
    rest = count_of(len(default.batch_sizes), "size")
    return f"{sizes}: {one:,.2f} {what}; the default of {rest}: {other:,.2f}"


def _lists(record: PlanRecord) -> RenderableType:
    rows = {"this plan": record.chosen, "default": record.default}
    columns = ["sizes", "pad requests\nper replay"]
    if record.mode:
        columns += ["us\nper step", "memory", "capture\nseconds", "without\ngraph"]
    table = text_table([""], columns)
    for name, cost in rows.items():
        cells = [f"{len(cost.batch_sizes)}", f"{cost.padding:,.2f}"]
        if record.mode:
            cells += [
                number(cost.step_us, ",.1f"),
                "-" if cost.memory_bytes is None else size(cost.memory_bytes),
                number(cost.capture_s, ",.1f"),
                f"{cost.eager_share:.1%}",
            ]
        table.add_row(name, *cells)
    return table


def _traffic(record: PlanRecord) -> Iterator[RenderableType]:
    """Yield a table with a row per captured size: its live sizes, steps, pads, and a bar."""
    total, most = sum(record.live_sizes.values()), 0.0
    rows = []
    for below, captured in pairwise((0, *record.chosen.batch_sizes)):
        rows.append((below + 1, captured, _between(record.live_sizes, below, captured)))
    last = record.chosen.batch_sizes[-1] if record.chosen.batch_sizes else 0
    rest = {live: n for live, n in record.live_sizes.items() if live > last}
    shares = [sum(found.values()) / total for _, _, found in rows]
    most = max([*shares, sum(rest.values()) / total])
    table = text_table(["live requests"], ["captured", "steps", "pads"])
    table.add_column("share of steps", no_wrap=True)
    for (first, captured, found), share in zip(rows, shares, strict=True):
        steps = sum(found.values())
        pads = sum(n * (captured - live) for live, n in found.items())
        table.add_row(
            f"{first} to {captured}" if first < captured else f"{captured}",
            f"{captured}",
            f"{steps:,}",
            f"{pads / steps:,.2f}" if steps else "-",
            Text(f"{bar(share / most, _BAR)} {share:.1%}"),
        )
    if rest:
        share = sum(rest.values()) / total
        cells = (f"above {last}", "none", f"{sum(rest.values()):,}", "-")
        table.add_row(*cells, Text(f"{bar(share / most, _BAR)} {share:.1%}"))
    yield table


def _between(live_sizes: Mapping[int, int], below: int, captured: int) -> dict[int, int]:
    return {live: n for live, n in live_sizes.items() if below < live <= captured}


def _budget(name: str, limit: float) -> str:
    texts = {
        "sizes": f"{limit:,.0f} sizes",
        "memory_bytes": f"{size(limit)} of memory",
        "capture_s": f"{limit:,.1f} s of capture",
    }
    return texts.get(name, plain(f"{name} {limit:g}"))
