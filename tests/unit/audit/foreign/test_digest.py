"""The work of a digest grows with the graph, not with its square."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from graphkit.audit.foreign.digest import digest_of_graphs
from graphkit.records import Pointer

SIZE = 64


class CountedArgument:
    """An argument that counts how often its pointers are read."""

    reads = 0

    def __init__(self, address):
        self._pointers = (Pointer(address=address, memory="external", name=""),)

    @property
    def pointers(self):
        CountedArgument.reads += 1
        return self._pointers


def digest(count):
    """Take the digest of a graph whose node i reads storage i and the one before it."""
    addresses = [0x1000 + SIZE * index for index in range(count)]
    nodes = [
        SimpleNamespace(
            index=index, short_name=f"kernel{index}", source="",
            arguments=[CountedArgument(address + 8), CountedArgument(address - SIZE)],
        )
        for index, address in enumerate(addresses)
    ]  # fmt: skip
    memories = {
        address: SimpleNamespace(
            begin=address, end=address + SIZE, is_weight=True, name=f"{address}"
        )
        for address in addresses
    }
    followed = SimpleNamespace(
        name="graph", graph=lambda: None, record=SimpleNamespace(nodes=nodes), memories=memories,
        kept=(), replays=0,
    )  # fmt: skip
    device = SimpleNamespace(
        synchronize=lambda: None, segments=list, is_mapped=lambda _address: True,
        inspect=lambda *_arguments: SimpleNamespace(nodes=()),
    )  # fmt: skip
    CountedArgument.reads = 0
    return digest_of_graphs(device, [followed]).graphs["graph"].memory


def test_each_storage_names_the_first_node_that_reads_it():
    memory = digest(3)
    readers = [memory[address].reader for address in sorted(memory)]
    assert readers == [f"`kernel{index}` (node {index})" for index in range(3)]


@pytest.mark.parametrize("count", [20, 200])
def test_each_argument_is_read_once(count):
    digest(count)
    assert CountedArgument.reads == 2 * count
