"""Handmade records like those of an H200, and a driver for the screen at any size.

``GRAPHKIT_REFRESH_GOLDEN=1 pytest tests/tui`` rewrites the golden screens; review the difference.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
from textual import events

from graphkit.records import (
    Argument,
    BufferRecord,
    CaptureRecord,
    Edge,
    Environment,
    ForeignRecord,
    GraphMemory,
    GraphRecord,
    ModeRecord,
    Node,
    Pointer,
    Process,
    ReplayStats,
    Segment,
    SizeRecord,
    Timing,
    load_record,
)

if find_spec("textual") is None:  # a GPU machine may hold torch alone: make gpu GPU_PYTHON=python3
    collect_ignore_glob = ["test_*.py"]

ENVIRONMENT = Environment(
    device="NVIDIA H200", torch="2.11.0", triton="3.6.0", cuda="13.0", driver="580.95",
    graphkit="0.1.0",
)  # fmt: skip
WIDTHS = {"TARGET_VERIFY": 4, "DRAFT_EXTEND_V2": 4}
SIZES = (1, 4, 8)
WEIGHTS, ARENA, POOL = 0x7F0000000000, 0x7F1000000000, 0x7F2000000000
ELEMENTWISE = "at::native::vectorized_elementwise_kernel"
ELEMENTWISE_NAME = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::silu_mul_functor"
    "<c10::BFloat16>, std::array<char*, 3ul> >(int, at::native::silu_mul_functor<c10::BFloat16>, "
    "std::array<char*, 3ul>)"
)


def weight(name, place):
    return Pointer(address=WEIGHTS + place * 0x10000, memory="weight", name=name)


def field(name, place):
    return Pointer(address=ARENA + place * 0x1000, memory="input", name=name)


def scratch(place):
    return Pointer(address=POOL + place * 0x200, memory="pool", name=f"pool+{place * 0x200:#x}")


def arguments(*pointers, name="", rows=0):
    """Each pointer as an argument of its own, then a number of rows."""
    made = [
        Argument(
            name=name, offset=8 * place, size=8, kind="pointer", text=f"{p.address:#x}",
            pointers=(p,),
        )
        for place, p in enumerate(pointers)
    ]  # fmt: skip
    number = Argument(offset=8 * len(made), size=4, kind="number", text=str(rows))
    return (*made, number) if rows else tuple(made)


class Builder:
    """Nodes one after the other, each waiting for the one before it."""

    def __init__(self, rows):
        self.rows, self.nodes, self.edges, self.start = rows, [], [], 0.0

    def add(self, short_name, module="", us=2.0, kind="kernel", pdl=False, **facts):
        index = len(self.nodes)
        if kind == "kernel":
            launch = {"grid": (self.rows, 1, 1), "block": (128, 1, 1), "registers": 40}
            facts = launch | {"shared_memory_bytes": 0} | facts
        facts.setdefault("name", short_name)
        self.nodes.append(
            Node(
                index=index, kind=kind, short_name=short_name, module=module, duration_us=us,
                start_us=self.start, **facts,
            )
        )  # fmt: skip
        self.start += us + 0.5
        if index:
            how = "programmatic" if pdl else "full"
            self.edges.append(Edge(source=index - 1, target=index, kind=how))

    def linear(self, module, us):
        pointers = (weight(f"{module}.weight", len(self.nodes)), scratch(len(self.nodes)))
        is_split = self.rows >= 32 and module.endswith("o_proj")
        tile = "64x64_64x6_1x2_h_bz_splitK_TNT" if is_split else "64x8_64x16_4x1_v_bz_TNT"
        name = f"nvjet_sm90_tst_{tile}"
        self.add(
            name, module, us, pdl=True, op="aten::mm", grid=(16, self.rows // 4 or 1, 1),
            cluster=(2, 1, 1), shared_memory_bytes=196_608, source="model.py:41 in forward",
            attributes={"programmatic stream serialization": "1"},
            arguments=arguments(*pointers, rows=self.rows),
        )  # fmt: skip
        if is_split:
            self.add(
                "cublasLt::splitKreduce_kernel", module, 1.5, op="aten::mm",
                name="void cublasLt::splitKreduce_kernel<32, 16, int, __nv_bfloat16>(...)",
                source="model.py:41 in forward",
            )  # fmt: skip


def nodes_and_edges(rows, num_layers):
    made = Builder(rows)
    fields = arguments(field("input_ids", 0), field("seq_lens", 2), name="table")
    made.add("_refresh", us=6.4, source="refresh.py:60 in refresh", arguments=fields)
    made.add("memset", kind="memset", us=0.9)
    made.add("_paged_metadata", us=2.2, arguments=arguments(field("seq_lens", 2)))
    made.add("indexSelectSmallIndex", "model.embed_tokens", 1.4, op="aten::embedding")
    for layer in range(num_layers):
        at = f"model.layers.{layer}"
        made.add("_rms_norm", f"{at}.input_layernorm", 1.3, op="mylib::rms_norm")
        for name in ("q_proj", "k_proj", "v_proj"):
            made.linear(f"{at}.self_attn.{name}", 4.0 + rows / 16)
        keys = arguments(scratch(3), field("out_cache_loc", 4), name="keys")
        made.add("_paged_attention", f"{at}.self_attn", 7.5 + rows / 8, arguments=keys)
        made.linear(f"{at}.self_attn.o_proj", 3.75)
        made.linear(f"{at}.mlp.gate_up_proj", 9.0)
        made.add(ELEMENTWISE, f"{at}.mlp", 1.1, op="aten::mul", name=ELEMENTWISE_NAME)
        made.linear(f"{at}.mlp.down_proj", 6.5)
    made.add("memcpy", kind="memcpy", us=1.2, name="copy 16,384 bytes, device to device")
    return tuple(made.nodes), tuple(made.edges)


def graph(mode, batch_size, num_layers=2):
    nodes, edges = nodes_and_edges(batch_size * WIDTHS.get(mode, 1), num_layers)
    busy = sum(node.duration_us for node in nodes)
    return GraphRecord(
        name=f"{mode} {batch_size}", backend="cuda", environment=ENVIRONMENT, mode=mode,
        batch_size=batch_size, nodes=nodes, edges=edges,
        timing=Timing(
            replays=50, p50_us=busy + 12.5, p95_us=busy + 15.0, unprofiled_us=busy + 2.25,
            critical_path=tuple(range(len(nodes))), critical_us=busy, bound_by="order",
        ),
        memory=GraphMemory(
            graph_bytes=batch_size << 18, pool_bytes=4 << 20,
            segments=(
                Segment(address=WEIGHTS, size=20 << 20, used=18 << 20, pool="default"),
                Segment(address=ARENA, size=2 << 20, used=65_536, pool="default"),
                Segment(address=POOL, size=4 << 20, used=3 << 20, pool="graph"),
            ),
        ),
    )  # fmt: skip


def buffer(name, place, *, bound=False, axis="token", dtype="int64", rows=32, pad=0.0):
    return BufferRecord(
        field=name, dtype=dtype, shape=(rows,), axis=axis, pad=pad,
        address=ARENA + place * 0x1000, size=rows * 8, is_bound=bound,
        meaning=f"one {name} of each {axis}",
    )  # fmt: skip


def mode(name, first_place, **facts):
    sizes = tuple(
        SizeRecord(
            batch_size=size, num_tokens=size * WIDTHS[name], num_nodes=len(graph(name, size).nodes),
            capture_ms=310.0 + size, pool_bytes=size << 18, replay_us=90.0 + 3 * size,
            eager_us=900.0 + size, largest_difference=0.0, batches_compared=size,
        )
        for size in SIZES
    )  # fmt: skip
    buffers = (
        buffer("input_ids", first_place),
        buffer("positions", first_place + 1),
        buffer("seq_lens", 2, axis="request", dtype="int32", rows=8, pad=1.0),
        buffer("hidden_states", 3, bound=name == "DRAFT_EXTEND_V2", dtype="bfloat16"),
    )
    return ModeRecord(
        mode=name, tokens_per_request=WIDTHS[name], host_planned=False, input_bytes=65_536,
        sizes=sizes, buffers=buffers, **facts,
    )  # fmt: skip


@pytest.fixture(scope="session")
def capture():
    """Two measured modes of three sizes each, with nodes."""
    busy = ReplayStats(
        replays=1_204, padded_rows=310,
        fallbacks={"batch size 9 is above the largest captured size, 8": 4,
                   "seq_lens is on the host": 1},
        replays_by_size={1: 4, 4: 200, 8: 1_000},
    )  # fmt: skip
    return CaptureRecord(
        target="tiny", backend="cuda", environment=ENVIRONMENT,
        modes=(mode("TARGET_VERIFY", 0, stats=busy), mode("DRAFT_EXTEND_V2", 8)),
        graphs=tuple(graph(name, size) for name in WIDTHS for size in SIZES),
    )  # fmt: skip


@pytest.fixture(scope="session")
def recording(capture):
    """Two processes; the first captured twice on one line and once on another."""
    lines = ("serve.py:88 in warm_up", "serve.py:88 in warm_up", "draft.py:12 in build")
    found = [
        replace(graph, name=f"{line.split()[0]} #{at}", mode="", batch_size=0, captured_at=line)
        for at, (line, graph) in enumerate(zip(lines, capture.graphs, strict=False))
    ]
    other = replace(found[0], name="worker.py:3 #0", captured_at="worker.py:3", process=1)
    return ForeignRecord(
        command=("python", "serve.py"), exit_code=0, environment=ENVIRONMENT,
        processes=(
            Process(pid=4101, command=("python", "serve.py")),
            Process(pid=4102, command=("python", "worker.py")),
        ),
        graphs=(*found, other),
    )  # fmt: skip


@pytest.fixture(scope="session")
def large():
    """One graph of more than 1,000 nodes."""
    made = graph("TARGET_VERIFY", 8, num_layers=100)
    assert len(made.nodes) > 1_000
    return made


@pytest.fixture(scope="session")
def huge():
    """One graph of 10,000 nodes in 100 layers, without edges."""
    first = graph("TARGET_VERIFY", 8).nodes[0]
    nodes = tuple(
        Node(
            index=index, kind="kernel", name="kernel()", short_name=f"kernel_{index % 10}",
            module=f"model.layers.{index // 100}", grid=first.grid, duration_us=1.0,
        )
        for index in range(10_000)
    )  # fmt: skip
    return GraphRecord(name="huge", backend="cuda", environment=ENVIRONMENT, nodes=nodes)


DATA = Path(__file__).parents[1] / "data"
"""Records saved on an H200."""


@pytest.fixture(scope="session")
def h200():
    """A capture of the reference model."""
    return load_record(DATA / "h200-capture.json")


@pytest.fixture(scope="session")
def compiled():
    """A compiled program: graphs without modes, times or buffers, the first without nodes."""
    return load_record(DATA / "h200-recording.json")


GOLDEN = Path(__file__).with_name("golden")


@pytest.fixture
def golden():
    """``golden(name, text)`` compares with the stored text of that name."""

    def compare(name, text):
        path = GOLDEN / f"{name}.txt"
        if os.environ.get("GRAPHKIT_REFRESH_GOLDEN"):
            path.write_text(text, encoding="utf-8")
        assert text == path.read_text(encoding="utf-8")

    return compare


class Driver:
    """A screen that keys are pressed on."""

    def __init__(self, app, pilot):
        self.app, self.pilot = app, pilot

    async def press(self, *keys):
        """Press keys and wait until the screen no longer changes."""
        await self.keys(*keys)
        await self.settle()

    async def keys(self, *keys):
        """Press keys, each after the layout that follows the one before; ``type:words`` types."""
        for key in keys:
            if key.startswith("type:"):
                await self.type(key.removeprefix("type:"))
            else:
                await self.pilot.press(key)
            await self.pilot.pause()

    async def restart(self, record):
        """Show the first page of a record, without a new app."""
        from graphkit.views.pages.initial import first_page
        from graphkit.views.tui.listing import Listing

        if self.app.focused:
            await self.pilot.press("escape")
        screen = self.app.screen
        screen._stack = [Listing(first_page(record))]
        screen._show_page()
        await self.pilot.pause()

    async def type(self, text):
        """Type into the prompt, all at once."""
        self.app.focused.post_message(events.Paste(text))
        await self.pilot.pause()

    async def settle(self):
        """Wait until the screen no longer changes."""
        seen = []
        while len(seen) < 4 or len(set(seen[-4:])) > 1:  # a layout takes several messages
            await self.pilot.pause()
            seen.append(self.text)

    async def answer(self, text):
        """Replace what a prompt suggests, and send it off."""
        await self.press("ctrl+u", f"type:{text}", "enter")

    async def resize(self, width, height):
        """Textual takes a new size when a timer ends."""
        await self.pilot.resize_terminal(width, height)
        while self.app._resize_timer or self.app.screen.size != (width, height):
            await self.pilot.pause(1 / 400)
        await self.settle()

    async def click_head(self, name):
        """Click on the head of a column."""
        await self.pilot.click("RowList", offset=(self.head.index(name), 0))

    @property
    def depth(self):
        """Number of pages that the escape key goes back through, this one included."""
        return len(self.app.screen.path)

    @property
    def listing(self):
        return self.app.screen.listing

    @property
    def selected(self):
        """The first cell of the selected row."""
        return self.listing.cells(self.listing.row)[0]

    @property
    def lines(self):
        """The screen as text."""
        strips = self.app.screen._compositor.render_strips()
        return ["".join(segment.text for segment in strip).rstrip() for strip in strips]

    @property
    def text(self):
        return "".join(f"{line}\n" for line in self.lines)

    @property
    def head(self):
        """The line of the columns' headings."""
        return self.lines[self.app.screen.query_one("RowList").region.y]

    @property
    def status(self):
        """The text of the status, which may take several lines."""
        region = self.app.screen.query_one("#status").region
        return " ".join(self.lines[region.y : region.bottom])


async def until_idle(_seconds=0):
    """Wait until no task of the app is ready to run. Only a resize waits for a timer."""
    ready = asyncio.get_running_loop()._ready
    await asyncio.sleep(0)
    while ready:
        await asyncio.sleep(0)


@pytest.fixture
def drive(monkeypatch):
    """``drive(record, script)`` shows a record and awaits ``script(driver)``."""
    # Textual's pilot sleeps until the process uses little time, several times per key.
    monkeypatch.setattr("textual.pilot.wait_for_idle", until_idle)
    monkeypatch.setattr("textual.app.wait_for_idle", until_idle)

    def run(record, script, size=(80, 24), **which):
        from graphkit.views.tui import InspectApp

        async def main():
            app = InspectApp(record, **which)
            async with app.run_test(size=size) as pilot:
                return await script(Driver(app, pilot))

        return asyncio.run(main())

    return run
