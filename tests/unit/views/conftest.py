"""A small capture that covers every part of a record."""

from __future__ import annotations

import dataclasses
import io
import itertools
import os
from pathlib import Path

import pytest
from rich.console import Console

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

GOLDEN = Path(__file__).parent / "golden"
REFRESH = "GRAPHKIT_REFRESH_GOLDEN"
"""Set it to 1 to rewrite the golden files; then review the difference."""
ENVIRONMENT = Environment(
    device="NVIDIA H200", torch="2.11.0", triton="3.6.0", cuda="13.0", driver="580.1", graphkit="1"
)
LAYERS = ("layers.0", "layers.1")
_EDGES = {"silu": "programmatic", "flash_fwd": "programmatic"}
GEMM = "void gemm_kernel<float, (Layout)1>(float const*, float*)"


@pytest.fixture
def text():
    """``text(view, width)``: what a pipe of that width gets."""

    def render(view, width=80):
        console = Console(width=width, file=io.StringIO(), color_system=None, _environ={})
        console.print(view)
        return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines()) + "\n"

    return render


@pytest.fixture
def golden():
    """``golden(name, text)``: the text is that of the stored file; see ``REFRESH``."""

    def check(name, found):
        path = GOLDEN / name
        if os.environ.get(REFRESH) == "1":
            path.parent.mkdir(exist_ok=True)
            path.write_text(found, encoding="utf-8")
        assert found == path.read_text(encoding="utf-8"), f"{name}: refresh with {REFRESH}=1"

    return check


def kernel(short_name, module, op, blocks, **facts):
    """A node without its place and its time."""
    return {
        "kind": "kernel", "name": facts.pop("name", f"void {short_name}(float*)"),
        "short_name": short_name, "grid": (blocks, 1, 1), "block": (128, 1, 1), "registers": 32,
        "module": module, "op": op, "source": "model.py:12 in forward", **facts,
    }  # fmt: skip


def argument(place, memory, name, offset=0):
    pointer = Pointer(address=0x7F0000000000 + 0x1000 * place, memory=memory, name=name)
    return Argument(offset=offset, size=8, kind="pointer", text=name, pointers=(pointer,))


def nodes_of(size):
    """What a graph of that size does, in order, without places and times."""
    yield kernel("refresh", "(refresh)", "graphkit::refresh", 1)
    yield {"kind": "memset", "name": "memset of 64 bytes", "short_name": "memset of 64 bytes"}
    for layer in LAYERS:
        attn = f"{layer}.attn"
        yield kernel("norm", layer, "aten::rms_norm", size)
        yield kernel(
            "gemm_kernel", f"{attn}.qkv", "aten::mm", 2 * size, name=GEMM,
            cluster=(2, 1, 1), shared_memory_bytes=49152, attributes={"priority": "2"},
            arguments=(
                argument(1, "weight", f"{attn}.qkv.weight"),
                argument(size, "pool", f"pool+{size * 512:#x}", 8),
                Argument(offset=16, size=4, kind="number", text=str(size)),
                Argument(
                    name="descriptor", offset=24, size=128, kind="struct",
                    text=f"128 bytes #0badcafe: input ids, pool+{size:#x}",
                    pointers=(
                        Pointer(address=0x7F00DEAD0000, memory="input", name="input ids"),
                        Pointer(
                            address=0x7F00BEEF0000 + size, memory="pool", name=f"pool+{size:#x}",
                            offset=64,
                        ),
                    ),
                ),
            ),
        )  # fmt: skip
        yield kernel("flash_fwd", attn, "aten::attention", size)
        yield kernel("gemm_kernel", f"{attn}.out", "aten::mm", size, name=GEMM)
        yield kernel("gemm_kernel", f"{layer}.mlp", "aten::mm", 4 * size, name=GEMM)
        yield kernel("silu", f"{layer}.mlp", "aten::silu", size)
        yield kernel("gemm_kernel", f"{layer}.mlp", "aten::mm", 4 * size, name=GEMM)
        yield kernel("gemm_kernel", f"{layer}.mlp", "aten::mm", 4 * size, name=GEMM)
    yield {"kind": "child graph", "name": "child graph", "short_name": "child graph",
           "module": "sampler"}  # fmt: skip
    yield kernel("argmax", "sampler", "aten::argmax", 1, parent=18)
    yield kernel("publish", "", "", 1)


def graph_of(mode, size, *, measured=True, places=nodes_of, environment=ENVIRONMENT):
    """A graph of so many requests whose edges make a chain, some of them programmatic."""
    made = []
    for index, facts in enumerate(places(size)):
        if measured and facts["kind"] != "child graph":
            facts = {"duration_us": 1.0 + index % 3 + size / 16, "start_us": index * 5.0, **facts}
        made.append(Node(index=index, **facts))
    outer = [node.index for node in made if node.parent is None]
    edges = tuple(
        Edge(source=i, target=j, kind=_EDGES.get(made[j].short_name, "full"))
        for i, j in itertools.pairwise(outer)
    )
    timing = Timing(
        replays=20, p50_us=100.0 + size, p95_us=110.0, unprofiled_us=90.0,
        critical_path=tuple(outer), critical_us=55.5, bound_by="order",
    )  # fmt: skip
    memory = GraphMemory(
        graph_bytes=size * 1024, pool_bytes=4 << 20,
        segments=(Segment(address=0x7F0000000000, size=2 << 20, used=1 << 20, pool="graph"),),
    )  # fmt: skip
    return GraphRecord(
        name=f"{mode} {size}", backend="cuda", environment=environment, mode=mode, batch_size=size,
        captured_at="runner.py:40 in capture", nodes=tuple(made), edges=edges,
        timing=timing if measured else None, memory=memory,
    )  # fmt: skip


def mode_of(mode, width, address):
    """A mode of two sizes that shares its hidden_states with the other mode."""
    fields = [("input_ids", "int64", address, 64), ("hidden_states", "bfloat16", 0x7E0000, 8192)]
    return ModeRecord(
        mode=mode, tokens_per_request=width, host_planned=False, input_bytes=8256,
        sizes=tuple(
            SizeRecord(
                batch_size=size, num_tokens=size * width, num_nodes=21, capture_ms=12.25 * size,
                pool_bytes=size * 2048, replay_us=None if size == 8 and width == 1 else 101.5,
            )
            for size in (4, 8)
        ),
        buffers=tuple(
            BufferRecord(
                field=name, dtype=dtype, shape=(8 * width,), axis="token", pad=0.0, address=where,
                size=size, is_bound=name == "hidden_states" and width == 1, meaning="what it is",
            )
            for name, dtype, where, size in fields
        ),
        stats=ReplayStats(
            replays=1200, padded_rows=34, fallbacks={"batch above the largest size": 2},
            replays_by_size={8: 1200},
        ),
    )  # fmt: skip


@pytest.fixture(scope="session")
def capture():
    """Two modes by two sizes; DRAFT 8 was not measured."""
    return CaptureRecord(
        target="tiny", backend="cuda", environment=ENVIRONMENT,
        modes=(mode_of("TARGET_VERIFY", 4, 0x1000), mode_of("DRAFT", 1, 0x2000)),
        graphs=(
            graph_of("TARGET_VERIFY", 4), graph_of("TARGET_VERIFY", 8),
            graph_of("DRAFT", 4), graph_of("DRAFT", 8, measured=False),
        ),
    )  # fmt: skip


@pytest.fixture(scope="session")
def graph(capture):
    """TARGET_VERIFY 8."""
    return capture.graphs[1]


@pytest.fixture(scope="session")
def recording(capture):
    """Two graphs of one name that no runner captured."""
    graphs = [
        dataclasses.replace(graph, name="runner.py:40", mode="", batch_size=0)
        for graph in capture.graphs[1:3]
    ]
    return ForeignRecord(
        command=("python", "serve.py"), exit_code=0, environment=ENVIRONMENT,
        processes=(Process(pid=7, command=("python", "serve.py")),), graphs=tuple(graphs),
    )  # fmt: skip


@pytest.fixture(scope="session")
def compiled():
    """What an H200 left behind of a compiled program; its first graph is empty."""
    return load_record(Path(__file__).parents[2] / "data" / "h200-recording.json")


@pytest.fixture(scope="session")
def make_graph():
    """See ``graph_of``."""
    return graph_of
