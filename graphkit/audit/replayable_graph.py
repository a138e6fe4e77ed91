"""A captured graph as audits see it: one of a runner, or of another program.

``stale_memory.runner_graph`` adapts a captured size of a runner, and
``foreign.audits.foreign_graph`` a graph of another program.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from graphkit.audit.audit_log import Check, argument_text
from graphkit.audit.finding_kinds import FindingKind
from graphkit.records import Argument, GraphRecord, Node, Pointer

if TYPE_CHECKING:
    from graphkit.audit.stale_memory.pool_memory import Poison, PoolMemory, Range
    from graphkit.graphs import Allocation

_LARGE_STRUCT, _ALWAYS_SET = 256, 32
_TORCH_KERNEL = "at::native::"
"""torch's own kernels take large structs by value and set them in part: strides of dimensions that
a tensor does not have keep what the host's stack held. Libraries set their descriptors in full."""


@dataclass(frozen=True, slots=True)
class Effect:
    """What other contents of pool memory change in a replay.

    Attributes:
        text: The change, as a clause.
        facts: Attributes of the ``Finding``, such as the field that differs.
    """

    text: str
    facts: Mapping[str, Any]


class ReplayableGraph(ABC):
    """A graph that can be replayed again and again from one state.

    Attributes:
        record: Its nodes, with their modules and lines.
        allocations: What operations of its capture allocated.
        pool_allocations: The same of all graphs of its pool, in the order of their captures.
        memory: Memory of its pool that may be overwritten before a replay.
        kept: Ranges of that memory to leave as they are. A search adds what it has found.
        deadline: Time at which a search gives up, as ``time.perf_counter``.
    """

    record: GraphRecord
    allocations: Sequence[Allocation]
    pool_allocations: Sequence[Allocation] = ()
    memory: PoolMemory
    kept: list[Range]
    deadline: float = math.inf

    @abstractmethod
    def effect(self, poison: Poison) -> Effect | None:
        """Replay after overwriting memory, and return what differs from a replay without it."""

    def first_dependent(self, _poison: Poison, _unit: int) -> Node | None:
        """Return the first node whose results depend on a unit of overwritten memory.

        ``None`` if nodes cannot be left out of a replay, or none depends on it.
        """
        return None

    def name_at(self, _address: int) -> str:
        """Return where a live object holds the memory at an address; empty if none does."""
        return ""


@dataclass(frozen=True, slots=True)
class Reference:
    """An address in an argument of a node.

    Attributes:
        is_set: False if the bytes may be leftovers of the host's stack.
    """

    node: Node
    argument: int
    pointer: Pointer
    is_set: bool

    def report(self, check: Check, kind: FindingKind, text: str, **facts: Any) -> None:
        """Report what is wrong with the address, as a clause that follows its argument."""
        offset = self.pointer.offset
        check.report(
            kind,
            f"{argument_text(self.node, self.argument, offset)} {text}",
            node=self.node,
            argument=self.argument,
            offset=offset,
            **facts,
        )


def references(record: GraphRecord) -> Iterator[Reference]:
    """Yield every address of every argument, in the order of the nodes."""
    for node in record.nodes:
        for index, argument in enumerate(node.arguments):
            for pointer in argument.pointers:
                is_set = not is_optional_pointer(node, argument, pointer.offset)
                yield Reference(node, index, pointer, is_set)


def distinct(references: Iterable[Reference]) -> Sequence[Reference]:
    """Return a reference per address: the first one that is set, or else the first."""
    by_address: dict[int, Reference] = {}
    for reference in references:
        known = by_address.setdefault(reference.pointer.address, reference)
        if reference.is_set and not known.is_set:
            by_address[reference.pointer.address] = reference
    return list(by_address.values())


class Readers:
    """The nodes that point to memory, by address.

    Args:
        nodes: Nodes of a graph.
        skipped: Kinds of memory that do not count, as in ``Pointer``.
    """

    def __init__(self, nodes: Sequence[Node], skipped: Collection[str] = ()) -> None:
        self._nodes = nodes
        self._places = sorted(
            (pointer.address, place, index)
            for place, node in enumerate(nodes)
            for index, argument in enumerate(node.arguments)
            for pointer in argument.pointers
            if pointer.memory not in skipped
        )

    def first(self, begin: int, end: int) -> tuple[Node, int] | tuple[None, None]:
        """Return the first node that points into a range, and the argument that does."""
        inside = slice(*(bisect_left(self._places, (address,)) for address in (begin, end)))
        place = min(((place, index) for _, place, index in self._places[inside]), default=None)
        return (None, None) if place is None else (self._nodes[place[0]], place[1])


def is_optional_pointer(node: Node, argument: Argument, offset: int) -> bool:
    """Return whether the bytes at an offset of a kernel argument may be leftovers of the stack."""
    is_large = argument.kind == "struct" and argument.size > _LARGE_STRUCT
    return is_large and offset >= _ALWAYS_SET and _TORCH_KERNEL in node.name
