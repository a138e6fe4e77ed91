"""Checksums of graphs and of the memory that they read."""

from __future__ import annotations

import zlib
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from graphkit.audit.foreign.audits.followed_graph import FollowedGraph
from graphkit.audit.foreign.audits.pointers import Blocks
from graphkit.audit.foreign.audits.watched_memory import chunk_sums
from graphkit.audit.foreign.graph_digest import GraphContents, GraphDigest, MemoryContents
from graphkit.records import Node


def digest_of_graphs(device: Any, graphs: Sequence[FollowedGraph]) -> GraphDigest:
    """Return the digest of graphs; each piece of memory is read once.

    Args:
        device: The device; see ``CudaDevice``.
        graphs: Live graphs.
    """
    device.synchronize()
    sums: dict[tuple[int, int], tuple[int | None, bool]] = {}
    blocks = Blocks(device.segments(), device.is_mapped)
    prints = {}
    for followed in graphs:
        graph = followed.graph()
        record = device.inspect(graph, None, followed.name)
        memory, readers = {}, _Readers(followed.record.nodes)
        for begin, end, kind, name in _memory(followed):
            if (begin, end) not in sums:
                sums[begin, end] = _checksum(device, blocks, begin, end)
            memory[begin] = MemoryContents(
                kind, name, *sums[begin, end], *readers.first(begin, end)
            )
        nodes = tuple((node.short_name, _node_hash(node)) for node in record.nodes)
        prints[followed.name] = GraphContents(nodes, memory)
    return GraphDigest(prints, sum(followed.replays for followed in graphs))


def _memory(followed: FollowedGraph) -> Iterator[tuple[int, int, str, str]]:
    """Yield begin, end, kind and name of the memory that must last between replays."""
    for memory in {memory.begin: memory for memory in followed.memories.values()}.values():
        yield memory.begin, memory.end, "weight" if memory.is_weight else "tensor", memory.name
    for begin, end in followed.kept:
        yield begin, end, "pool", f"pool {begin:#x} to {end:#x}"


def _checksum(device: Any, blocks: Blocks, begin: int, end: int) -> tuple[int | None, bool]:
    """Return the checksum of memory, and whether it is zero; ``None`` if it is gone."""
    last = blocks.at(end - 1)
    is_allocated = blocks.at(begin) is not None and last is not None and end <= last.end
    if not is_allocated or not device.is_mapped(begin) or not device.is_mapped(end - 1):
        return None, False
    first = begin // 8 * 8
    sums = chunk_sums(device.device_bytes(first, end)).tolist()
    return hash(tuple(sums)), not any(sums)


def _node_hash(node: Node) -> str:
    """Return a hash of what a node does, without what is known of its memory and origin."""
    arguments = tuple(
        (argument.size, tuple(pointer.address for pointer in argument.pointers))
        if argument.pointers
        else (argument.size, argument.text)
        for argument in node.arguments
    )
    plain = replace(node, arguments=(), module="", op="", source="", scope="")
    return f"{zlib.crc32(repr((plain, arguments)).encode()):08x}"


class _Readers:
    """The nodes that point to memory, by address."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._nodes = nodes
        self._places = sorted(
            (pointer.address, place)
            for place, node in enumerate(nodes)
            for argument in node.arguments
            for pointer in argument.pointers
        )

    def first(self, begin: int, end: int) -> tuple[str, str]:
        """Return the first node that points into a range, as text and its line; or nothing."""
        inside = slice(*(bisect_left(self._places, (address, 0)) for address in (begin, end)))
        place = min((place for _, place in self._places[inside]), default=None)
        if place is None:
            return "", ""
        node = self._nodes[place]
        line = f" at {node.source}" if node.source else ""
        return f"`{node.short_name}` (node {node.index}){line}", node.source
