"""A CaptureRecord as text: its overview, and the verdict; and the memory of its graphs."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.text import Text

from graphkit.records import (
    CaptureRecord,
    MemoryEstimate,
    Mismatch,
    ModeRecord,
    WrapperRecord,
    count_of,
    distinct_text,
)
from graphkit.views.formatting import facts_table, plain, size, text_table
from graphkit.views.pages.overview import overview_page
from graphkit.views.text.page import page_view

_MAX_MISMATCHES = 10


def capture_view(record: CaptureRecord) -> RenderableType:
    """Return the overview of the capture and the verdict on its replays."""
    loops = [sum(loop.graph_bytes for loop in mode.loops) for mode in record.modes]
    return Group(
        page_view(overview_page(record)),
        "",
        *(Text(f"loops take {size(in_loops)} of the pool") for in_loops in loops if in_loops),
        *_verdict(record),
        *(_wrapper_verdict(record.wrapper) if record.wrapper is not None else ()),
    )


def memory_view(estimate: MemoryEstimate) -> RenderableType:
    """Return the memory of the graphs by runner, and that of all parts."""
    table = text_table(["mode"], ["sizes", "measured", "pool", "executables"])
    for mode in estimate.graphs:
        measured = ", ".join(map(str, mode.measured_sizes)) or "stays eager"
        cells = f"{len(mode.batch_sizes)}", measured, size(mode.pool_bytes)
        table.add_row(plain(mode.mode), *cells, size(mode.executable_bytes))
    sizes = sum(len(mode.batch_sizes) for mode in estimate.graphs)
    parts = estimate.to_dict()
    title = f"{size(parts.pop('total'))} of memory with graphs of {count_of(sizes, 'size')}"
    facts = facts_table((part.replace("_", " "), size(n)) for part, n in parts.items())
    return Group(Text(title, style="bold"), table, Text(), facts)


def _verdict(record: CaptureRecord) -> Iterator[Text]:
    compared = sum(captured.batches_compared for captured in record.sizes)
    if not record.sizes:
        yield Text("No graph was captured: every batch falls back.", style="yellow")
        return
    if not record.mismatches:
        of_steps = sum(e.batches_compared for m in record.modes if m.loops for e in m.sizes)
        if compared > of_steps or not of_steps:
            yield Text(
                f"{count_of(compared - of_steps, 'live batch')} replayed: each equals the padded "
                "path without a graph bit by bit, and eager within rounding.",
                style="green",
            )
        yield from (_step_verdict(mode, of_steps) for mode in record.modes if mode.loops)
        return
    wrong = {(m.mode, m.batch_size, m.padded_batch_size) for m in record.mismatches}
    verb = "is" if len(wrong) == 1 else "are"
    yield Text(f"{len(wrong)} of {count_of(compared, 'replay')} {verb} wrong:", style="bold red")
    for mismatch in record.mismatches[:_MAX_MISMATCHES]:
        yield Text(f"  {_sentence(mismatch)}", style="red")
    more = len(record.mismatches) - _MAX_MISMATCHES
    if more > 0:
        yield Text(f"  and {more} more; --json lists all", style="red")


def _step_verdict(mode: ModeRecord, compared: int) -> Text:
    text = f"{mode.mode}: {count_of(compared, 'live batch')} replayed: each equals the padded step "
    text += "without a graph bit by bit, in its report and in the state of the requests"
    steps = min(loop.steps_compared for loop in mode.loops)
    if steps:
        return Text(
            f"{text}; {count_of(steps, 'step')} in one launch, as in single replays.", "green"
        )
    text += ". Launches were not compared: the step is not repeatable."
    return Text(text, style="yellow")


def _wrapper_verdict(wrapper: WrapperRecord) -> Iterator[Text]:
    if wrapper.skipped:
        yield Text(f"Not compared with the model: {wrapper.skipped}.", style="yellow")
        return
    difference = wrapper.difference
    if difference is not None:
        yield Text("The wrapper differs from its model:", style="bold red")
        for line in (f"{difference.mode}: {difference.text}", difference.source, difference.advice):
            yield Text(f"  {line}", style="red")
        return
    yield Text(
        f"{count_of(wrapper.rows, 'row')} compared with the model, after prompts of up to "
        f"{count_of(wrapper.prompt_length, 'token')}: each has its logits within rounding.",
        style="green",
    )
    for name in wrapper.not_reached:
        yield Text(f"No prompt is longer than {name} of the model.", style="yellow")


def _sentence(m: Mismatch) -> str:
    expected, got = distinct_text(m.expected, m.got)
    is_equal = m.expected == m.got or (m.expected != m.expected and m.got != m.got)  # NaN
    value = got if is_equal else f"{got} instead of {expected}"
    if m.distance:
        value += f" ({m.distance})"
    location = ", ".join(filter(None, (m.module, m.source)))
    return (
        f"{m.mode}, {count_of(m.batch_size, 'request')} at size {m.padded_batch_size}: {m.kind}: "
        f"{m.field} row {m.row} (request {m.request}) is {value}"
        f"{f', made by {location}' if location else ''}"
    )
