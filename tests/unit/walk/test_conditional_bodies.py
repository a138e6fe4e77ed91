"""Bodies of conditional nodes, parsed from DOT files of the driver."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from graphkit.graphs.walk.driver_nodes import (
    ConditionalBody,
    conditional_bodies,
    parse_bodies,
)


def node(handle, kind="KERNEL", bodies=(), form="node handle: {:#018x}"):
    """A node's label in a DOT file with handles."""
    inner = "".join(f"|graph_{number}" + "}" for number in bodies)
    return f"{{{kind}|{form.format(handle)}{inner}}}"


def conditional(handle, *bodies):
    return node(handle, "CONDITIONAL", bodies)


def cluster(number, labels, edges=()):
    """A graph of a DOT file; labels are a list, or a dict by node number."""
    numbered = labels.items() if isinstance(labels, dict) else enumerate(labels)
    lines = [f"subgraph cluster_{number} {{", f'label="graph_{number}" graph[style="dashed"];']
    lines += [
        f'"graph_{number}_node_{i}"[style="bold" shape="record" label="{label}"];'
        for i, label in numbered
    ]
    lines += [
        f'"graph_{number}_node_{a}" -> "graph_{number}_node_{b}" [headlabel=0];' for a, b in edges
    ]
    return "\n".join([*lines, "}"])


def dot(*clusters):
    return "\n".join(["digraph dot {", *clusters, "}", ""])


def test_an_if_has_one_body():
    text = dot(
        cluster(1, [node(0x10), conditional(0x11, 2)], [(0, 1)]),
        cluster(2, [node(0x20), node(0x21), node(0x22)], [(0, 1), (0, 2)]),
    )
    assert parse_bodies(text) == {0x11: (ConditionalBody((0x20, 0x21, 0x22), ((0, 1), (0, 2))),)}


def test_bodies_keep_the_order_of_the_conditional():
    """IF with ELSE has two bodies, SWITCH one per case, WHILE one."""
    text = dot(
        cluster(1, [conditional(0x10, 3, 2), conditional(0x11, 4, 5, 6), conditional(0x12, 7)]),
        *(cluster(n, [node(0x20 + n)]) for n in range(2, 8)),
    )
    found = {at: [body.nodes for body in bodies] for at, bodies in parse_bodies(text).items()}
    assert found == {
        0x10: [(0x23,), (0x22,)], 0x11: [(0x24,), (0x25,), (0x26,)], 0x12: [(0x27,)],
    }  # fmt: skip


def test_conditionals_nest_also_inside_of_child_graphs():
    text = dot(
        cluster(1, [conditional(0x10, 2), node(0x11, "GRAPH")]),
        cluster(2, [node(0x20), conditional(0x21, 4)], [(0, 1)]),
        cluster(3, [conditional(0x30, 5)]),  # the child graph
        cluster(4, [node(0x40)]),
        cluster(5, [node(0x50), node(0x51)]),
    )
    assert {at: bodies[0].nodes for at, bodies in parse_bodies(text).items()} == {
        0x10: (0x20, 0x21), 0x21: (0x40,), 0x30: (0x50, 0x51),
    }  # fmt: skip


def test_nodes_are_ordered_by_their_number():
    labels = {10: node(0x2A), 2: node(0x22), 0: node(0x20)}
    text = dot(cluster(1, [conditional(0x10, 2)]), cluster(2, labels))
    assert parse_bodies(text)[0x10][0].nodes == (0x20, 0x22, 0x2A)


def test_a_body_may_be_empty():
    assert parse_bodies(dot(cluster(1, [conditional(0x10, 2)]), cluster(2, []))) == {
        0x10: (ConditionalBody((), ()),)
    }


def test_a_graph_without_conditionals_has_no_bodies():
    assert parse_bodies(dot(cluster(1, [node(0x10), node(0x11)], [(0, 1)]))) == {}
    assert parse_bodies("") == {}


VERBOSE = (
    "\n| {{ID | 0 (topoId: 3) | _Zk\\<\\<\\<1,128,0\\>\\>\\>}}\n"
    "| {{{{node handle | func handle}} | {{{:#018x} | 0x000055E7270A5A90}}}}\n"
    "| {{cooperative | 0}}\n"
)
COPY = "\n| {{{{ID | node handle}} | {{2 (topoId: 1) | {:#018x}}}}}\n| {{kind | DtoD}}\n"


@pytest.mark.parametrize("form", ["node handle: {:#x}", "node handle | 0x{:X}", VERBOSE, COPY])
def test_handles_are_read_in_every_form_of_a_dot(form):
    """Verbose files (CUDA 12.8) have tables, and labels of several lines."""
    text = dot(
        cluster(1, [conditional(0x10, 2)]),
        cluster(2, [node(0x55E7277A5C20, form=form), node(0x55E7277A6370, form=form)], [(0, 1)]),
    )
    assert parse_bodies(text)[0x10] == (
        ConditionalBody((0x55E7277A5C20, 0x55E7277A6370), ((0, 1),)),
    )


def test_the_driver_prints_handles():
    asked = []

    def print_dot(graph, path, flags):
        asked.append((graph, flags))
        text = dot(cluster(1, [conditional(0x10, 2)]), cluster(2, [node(0x20)]))
        Path(path.decode()).write_text(text)
        return (0,)

    flags = SimpleNamespace(CU_GRAPH_DEBUG_DOT_FLAGS_HANDLES=1024)
    driver = SimpleNamespace(cuGraphDebugDotPrint=print_dot, CUgraphDebugDot_flags=flags)
    assert conditional_bodies(driver, 77)[0x10][0].nodes == (0x20,)
    assert asked == [(77, 1024)]
