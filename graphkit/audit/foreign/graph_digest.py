"""Digests of graphs and of the memory that they read, and their differences."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from graphkit.audit.finding_kinds import FindingKind
from graphkit.records import Finding
from graphkit.records.audit import Audit, worst_first


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


@dataclass(frozen=True, slots=True)
class DigestDifference:
    """What differs between two digests.

    Attributes:
        kind: ``weight``, ``tensor``, ``pool`` or ``template``.
        severity: ``error`` if a replay gives wrong results, ``note`` if it may be on purpose.
        name: The weight, tensor, pool range or node.
        text: What happened, as one sentence.
        graphs: Names of the graphs that read it.
        source: Line of the first node that reads it.
    """

    kind: str
    severity: str
    name: str
    text: str
    graphs: tuple[str, ...]
    source: str = ""

    def finding(self) -> Finding:
        """Return it as a finding of a report."""
        kind = FindingKind[f"{self.kind.upper()}_DIFFERS"]
        return Finding(
            audit=Audit.FINGERPRINT,
            kind=kind.value,
            severity=self.severity,
            mode=self.graphs[0],
            modes=self.graphs,
            names=(self.name,),
            text=self.text,
            advice=kind.advice,
            source=self.source,
            cause=f"{self.kind} {self.name}",
        )


def differences(before: GraphDigest, after: GraphDigest) -> tuple[DigestDifference, ...]:
    """Return the differences, one for each weight, tensor, pool range and node, errors first."""
    was_replayed = before.replays != after.replays
    merged: dict[tuple[str, str, str], DigestDifference] = {}
    for graph, old in before.graphs.items():
        new = after.graphs.get(graph)
        if new is None:
            continue
        of_memory = _memory_differences(graph, old, new, was_replayed=was_replayed)
        for difference in (*_node_differences(graph, old, new), *of_memory):
            key = difference.kind, difference.name, difference.text
            earlier = merged.get(key)
            graphs = (*(earlier.graphs if earlier else ()), graph)
            merged[key] = replace(difference, graphs=graphs)
    return worst_first(merged.values())


def _memory_differences(
    graph: str, old: GraphContents, new: GraphContents, *, was_replayed: bool
) -> Iterator[DigestDifference]:
    """Yield the memory that differs; replays write tensors and the pool, but no weights."""
    for address, was in old.memory.items():
        now = new.memory.get(address)
        if now is None or now.checksum == was.checksum:
            continue
        reader = f", which {was.reader} reads," if was.reader else ""
        what = f"the {was.kind} `{was.name}`{reader}"
        if now.checksum is None:
            text, severity = f"the memory of {what} is gone.", "error"
        elif was_replayed and was.kind != "weight":
            continue
        elif now.is_zero and was.kind != "tensor":
            text, severity = f"{what} is all zeros now and was not.", "error"
        else:
            text, severity = f"{what} has other content.", "note"
        yield DigestDifference(was.kind, severity, was.name, text, (graph,), was.source)


def _node_differences(
    graph: str, old: GraphContents, new: GraphContents
) -> Iterator[DigestDifference]:
    for index, (was, now) in enumerate(zip(old.nodes, new.nodes, strict=False)):
        if was != now:
            text = f"node {index}, `{was[0]}`, is `{now[0]}` now, or has other arguments."
            yield DigestDifference("template", "error", f"node {index}", text, (graph,))
            return
    if len(old.nodes) != len(new.nodes):
        text = f"the graph has {len(new.nodes)} nodes instead of {len(old.nodes)}."
        yield DigestDifference("template", "error", "nodes", text, (graph,))
