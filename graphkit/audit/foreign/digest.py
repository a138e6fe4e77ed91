"""Checksums of graphs and of the memory that they read, and their differences.

Loads without torch.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from graphkit.audit.audit_log import Check
from graphkit.audit.finding_kinds import FindingKind
from graphkit.records import Finding, Node
from graphkit.records.audit import Audit, worst_first

if TYPE_CHECKING:
    from graphkit.audit.foreign.audits.followed_graph import FollowedGraph
    from graphkit.audit.foreign.audits.pointers import Blocks


@dataclass(frozen=True, slots=True)
class MemoryContents:
    """The content of some memory.

    Attributes:
        kind: ``weight``, ``tensor``, or ``pool`` for memory of the graph's pool.
        name: Name of the tensor, or the offset in the pool.
        checksum: Depends on all bytes; ``None`` if the memory is gone.
        is_zero: Whether all bytes are zero.
        reader: The first node that points to it, as text with its line; empty if none does.
        source: Line of that node.
    """

    kind: str
    name: str
    checksum: int | None
    is_zero: bool
    reader: str = ""
    source: str = ""


@dataclass(frozen=True, slots=True)
class GraphContents:
    """A graph and the memory that it reads.

    Attributes:
        nodes: A hash of each node, with its kernel's name.
        memory: The memory by address.
    """

    nodes: tuple[tuple[str, str], ...]
    memory: dict[int, MemoryContents] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GraphDigest:
    """Checksums of all graphs of a process.

    Attributes:
        graphs: Each graph by its name.
        replays: Number of replays of all graphs so far.
    """

    graphs: dict[str, GraphContents]
    replays: int


def differences(before: GraphDigest, after: GraphDigest) -> tuple[Finding, ...]:
    """Return a finding for each weight, tensor, pool range and node that differs, errors first."""
    was_replayed = before.replays != after.replays
    merged: dict[tuple[str, str], Finding] = {}
    for graph, old in before.graphs.items():
        new = after.graphs.get(graph)
        if new is None:
            continue
        check = Check(Audit.FINGERPRINT, graph, 0)
        _compare_nodes(old, new, check)
        _compare_memory(old, new, check, was_replayed=was_replayed)
        for finding in check.findings:
            key = finding.cause, finding.text
            modes = (*(merged[key].modes if key in merged else ()), graph)
            merged[key] = replace(finding, mode=modes[0], modes=modes)
    return worst_first(merged.values())


def _compare_memory(
    old: GraphContents, new: GraphContents, check: Check, *, was_replayed: bool
) -> None:
    """Report the memory that differs; replays write tensors and the pool, but no weights."""
    for address, was in old.memory.items():
        now = new.memory.get(address)
        if now is None or now.checksum == was.checksum:
            continue
        reader = f", which {was.reader} reads," if was.reader else ""
        what = f"the {was.kind} `{was.name}`{reader}"
        facts: dict[str, Any] = {"names": (was.name,), "source": was.source}
        if now.checksum is None:
            text = f"the memory of {what} is gone."
        elif was_replayed and was.kind != "weight":
            continue
        elif now.is_zero and was.kind != "tensor":
            text = f"{what} is all zeros now and was not."
        else:
            text, facts["severity"] = f"{what} has other content.", "note"
        kind = FindingKind[f"{was.kind.upper()}_DIFFERS"]
        check.report(kind, text, cause=f"{kind} {was.name}", **facts)


def _compare_nodes(old: GraphContents, new: GraphContents, check: Check) -> None:
    """Report the first node that differs, or their number."""
    name, text = "nodes", f"the graph has {len(new.nodes)} nodes instead of {len(old.nodes)}."
    for index, (was, now) in enumerate(zip(old.nodes, new.nodes, strict=False)):
        if was != now:
            name = f"node {index}"
            text = f"{name}, `{was[0]}`, is `{now[0]}` now, or has other arguments."
            break
    if old.nodes != new.nodes:
        kind = FindingKind.TEMPLATE_DIFFERS
        check.report(kind, text, names=(name,), cause=f"{kind} {name}")


def digest_of_graphs(device: Any, graphs: Sequence[FollowedGraph]) -> GraphDigest:
    """Return the digest of live graphs; each piece of memory is read once."""
    from graphkit.audit.foreign.audits.pointers import Blocks
    from graphkit.audit.replayable_graph import Readers

    device.synchronize()
    sums: dict[tuple[int, int], tuple[int | None, bool]] = {}
    blocks, contents = Blocks(device.segments(), device.is_mapped), {}
    for followed in graphs:
        record = device.inspect(followed.graph(), None, followed.name)
        memory, readers = {}, Readers(followed.record.nodes)
        for begin, end, kind, name in _memory(followed):
            if (begin, end) not in sums:
                sums[begin, end] = _checksum(device, blocks, begin, end)
            node, reader = readers.first(begin, end)[0], ""
            if node is not None:
                line = f" at {node.source}" if node.source else ""
                reader = f"`{node.short_name}` (node {node.index}){line}"
            source = "" if node is None else node.source
            memory[begin] = MemoryContents(kind, name, *sums[begin, end], reader, source)
        nodes = tuple((node.short_name, _node_hash(node)) for node in record.nodes)
        contents[followed.name] = GraphContents(nodes, memory)
    return GraphDigest(contents, sum(followed.replays for followed in graphs))


def _memory(followed: FollowedGraph) -> Iterator[tuple[int, int, str, str]]:
    """Yield begin, end, kind and name of the memory that must last between replays."""
    for memory in {memory.begin: memory for memory in followed.memories.values()}.values():
        yield memory.begin, memory.end, "weight" if memory.is_weight else "tensor", memory.name
    for begin, end in followed.kept:
        yield begin, end, "pool", f"pool {begin:#x} to {end:#x}"


def _checksum(device: Any, blocks: Blocks, begin: int, end: int) -> tuple[int | None, bool]:
    """Return the checksum of memory, and whether it is zero; ``None`` if it is gone."""
    from graphkit.audit.bits import chunk_sums

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
        (argument.size, tuple(pointer.address for pointer in argument.pointers) or argument.text)
        for argument in node.arguments
    )
    plain = replace(node, arguments=(), module="", op="", source="", scope="")
    return f"{zlib.crc32(repr((plain, arguments)).encode()):08x}"
