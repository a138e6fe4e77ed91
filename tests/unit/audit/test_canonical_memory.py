"""Addresses in arguments are compared by what they name, wherever the allocator placed it."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from graphkit.audit import canonical_nodes
from graphkit.audit.canonical_nodes import (
    CanonicalArgument,
    CanonicalMemory,
    CanonicalNode,
    _canonical_nodes,
)
from graphkit.audit.capture_differences import capture_differences
from graphkit.audit.foreign.audits.device import CudaDevice
from graphkit.graphs import Allocation
from graphkit.graphs.attribution import NodeOrigin
from graphkit.graphs.walk.arguments import Parameter
from graphkit.graphs.walk.driver_nodes import DriverNode
from graphkit.graphs.walk.memory_map import MemoryMap

POOL, BASE, UNIT = (0, 7), 1 << 41, 512
NAMES = "embed", "norm", "mean", "scores"
"""What each node of the step allocates: it reads the tensor of the node before."""


def segment(address, blocks, pool):
    total = UNIT * len(blocks)
    return {
        "address": address, "total_size": total, "active_size": total, "segment_pool_id": pool,
        "blocks": [
            {"address": address + i * UNIT, "size": UNIT, "state": state}
            for i, state in enumerate(blocks)
        ],
    }  # fmt: skip


def pointers(*addresses):
    return [Parameter(8 * i, 8, a.to_bytes(8, "little"), "") for i, a in enumerate(addresses)]


def capture(places, reads=None, table=(BASE, "#1"), scratch=15, base=BASE + (1 << 30)):
    """Return the nodes of a step whose tensors have these places in the pool.

    Args:
        places: Place of each tensor.
        reads: Tensor that each node reads; ``None`` selects that of the node before.
        table: Address and digest of a table without a name that the first node reads.
        scratch: Place of the scratch memory of each operation.
        base: First address of the pool.
    """
    at = {name: base + UNIT * place for name, place in zip(NAMES, places, strict=True)}
    allocations = [
        Allocation(at[name], at[name] + 64, None, name, "", True, node)
        for node, name in enumerate(NAMES)
    ]
    memory = CanonicalMemory(
        allocations,
        MemoryMap(
            {},
            [
                segment(table[0], ["active_allocated"], (0, 0)),
                segment(base, ["active_allocated"] * 16, POOL),
            ],
            POOL,
        ),
        MemoryMap({}),
        lambda _address: False,
        lambda _block: table[1],
    )
    nodes = []
    for node, name in enumerate(NAMES):
        source = (reads or ("", *NAMES))[node]
        read = at[source] + 16 if source else table[0] + 8
        origin = NodeOrigin(op=f"aten::{name}", operands=((at[name], 64), (read - 16, 64)))
        found = memory.arguments(node, pointers(at[name], read, base + UNIT * scratch), origin)
        arguments = tuple(CanonicalArgument("", *each) for each in found)
        nodes.append(CanonicalNode(name, (), arguments))
    return nodes


def differences(one, other):
    return [(each.node, each.argument) for each in capture_differences(one, other, {})]


@pytest.mark.parametrize("seed", range(20))
def test_tensors_at_shuffled_addresses_are_no_difference(seed):
    random.seed(seed)
    captures = []
    for base in (BASE + (1 << 30), BASE + (1 << 31)):
        first, second, scratch = random.sample(range(15), 3)
        # The third tensor takes the place of the first one, which is free again.
        places = random.choice([[first, second] * 2, [first, second, first, scratch]])
        captures.append(capture(places, scratch=scratch if places[3] == second else 15, base=base))
    assert not differences(*captures)


def test_another_tensor_is_a_difference_at_equal_and_at_other_addresses():
    plain = capture([0, 1, 2, 3])
    reads = ("", "embed", "norm", "norm")  # the last node skips the mean
    assert differences(plain, capture([0, 1, 2, 3], reads)) == [(3, 1)]
    assert differences(plain, capture([7, 4, 9, 1], reads)) == [(3, 1)]


def test_a_table_without_a_name_is_compared_by_its_place_or_its_content():
    plain = capture([0, 1, 2, 3], table=(BASE, "#1"))
    assert not differences(plain, capture([0, 1, 2, 3], table=(BASE, "#2")))
    assert not differences(plain, capture([0, 1, 2, 3], table=(BASE + UNIT, "#1")))
    (found,) = capture_differences(plain, capture([0, 1, 2, 3], table=(BASE + UNIT, "#2")), {})
    assert (found.node, found.argument, found.offset, found.is_memory) == (0, 1, 0, True)


def test_a_place_that_a_later_tensor_took_is_the_later_one():
    nodes = capture([0, 1, 0, 1])
    numbers = [int.from_bytes(node.arguments[0].data[4:], "little") for node in nodes]
    assert numbers == [1, 2, 3, 4]


def test_a_node_inside_of_another_reads_what_that_node_does():
    """Nodes of child graphs follow all nodes of the graph around them."""
    place = BASE, BASE + UNIT
    memory = CanonicalMemory(
        [Allocation(*place, None, "", "", True, 0), Allocation(*place, None, "", "", True, 1)],
        MemoryMap({}, [segment(BASE, ["active_allocated"] * 4, POOL)], POOL),
        MemoryMap({}), lambda _: False, lambda _: "",
    )  # fmt: skip
    nodes = [
        DriverNode(kind="child graph", name="child graph"),
        DriverNode(kind="kernel", name="later", parameters=tuple(pointers(BASE))),
        DriverNode(kind="kernel", name="inner", parameters=tuple(pointers(BASE)), parent=0),
    ]
    canonical = _canonical_nodes(nodes, [NodeOrigin(), NodeOrigin()], memory)
    assert [node.name for node in canonical] == ["child graph", "later", "inner"]
    numbers = [int.from_bytes(node.arguments[0].data[4:], "little") for node in canonical[1:]]
    assert numbers == [2, 1]


def test_a_graph_of_a_device_is_read_by_driver_and_allocator(monkeypatch):
    """A graph of two nodes, whose second one reads what the first one made."""
    table = torch.arange(UNIT, dtype=torch.uint8)
    kernels = [
        DriverNode(kind="kernel", name="first", parameters=tuple(pointers(BASE))),
        DriverNode(
            kind="kernel", name="second", parameters=tuple(pointers(BASE + 8, table.data_ptr()))
        ),
    ]
    segments = [
        segment(BASE, ["active_allocated"], POOL),
        segment(table.data_ptr(), ["active_allocated"], (0, 0)),
    ]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda *_, **__: segments)
    monkeypatch.setattr(canonical_nodes, "DriverWalk", lambda handle: SimpleNamespace(nodes=handle))
    monkeypatch.setattr(canonical_nodes, "memory_kind", lambda _address: "")
    monkeypatch.setattr(
        canonical_nodes, "device_bytes",
        lambda address, size, _device: CudaDevice.host_bytes(address, address + size),
    )  # fmt: skip

    graph = SimpleNamespace(
        graph=SimpleNamespace(pool=lambda: POOL, raw_cuda_graph=lambda: kernels),
        allocations=[Allocation(BASE, BASE + 64, None, "", "", True, 0)],
        origins=(),
        device=torch.device("cpu"),
    )
    first, second = canonical_nodes.canonical_nodes(graph, {})
    assert [each.data[4] for each in (first.arguments[0], second.arguments[0])] == [1, 1]
    assert second.arguments[0].data[0] == 8
    (constant,) = second.arguments[1].constants
    moved = replace(constant, address=constant.address + UNIT)
    assert constant.is_same(moved)
    named = canonical_nodes.canonical_nodes(graph, {"weight": {"table": table}})
    (constant,) = named[1].arguments[1].constants
    assert not constant.is_same(replace(constant, address=constant.address + UNIT))
