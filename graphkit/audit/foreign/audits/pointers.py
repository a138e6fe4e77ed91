"""Check what memory a foreign graph points to: after its capture, and again before replays.

An address is an error if what it pointed to at the capture is gone, because a replay then reads
what the allocator put there since. Memory without a tensor is a library's workspace, or a tensor
that C++ code holds; it is counted, and an error only once the allocator has it back.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from functools import partial
from typing import Any

from graphkit.audit.audit_log import Check, argument_text
from graphkit.audit.finding_kinds import FindingKind
from graphkit.audit.foreign.audits.device import Segments
from graphkit.audit.foreign.audits.followed_graph import (
    DEFAULT_POOL,
    Block,
    FollowedGraph,
    blocks_of,
)
from graphkit.audit.foreign.audits.static_memory import StaticMemories, StaticMemory
from graphkit.audit.live_tensors import LiveTensors
from graphkit.audit.pointers import Seen, report_pointers
from graphkit.audit.replayable_graph import Readers, Reference
from graphkit.records import count_of

_REPLACED_ADVICE = "Copy new values into the tensor that was captured (copy_), or capture again."
_UNMAPPED_ADVICE = "Wake the memory up at the same addresses before the next replay."


class Blocks:
    """The blocks of torch's allocator by address.

    Args:
        segments: The allocator's segments.
        is_mapped: Returns whether memory is mapped at an address. Allocators that put memory to
            sleep keep its addresses and blocks without memory behind them.
    """

    def __init__(self, segments: Segments, is_mapped: Callable[[int], bool]) -> None:
        self.is_mapped = is_mapped
        self._blocks = sorted(blocks_of(segments))

    def at(self, address: int) -> Block | None:
        """Return the block that holds an address; ``None`` outside of the allocator's memory."""
        index = bisect_right(self._blocks, address, key=lambda block: block.begin) - 1
        block = self._blocks[index] if index >= 0 else None
        return block if block is not None and address < block.end else None


def check_capture(
    followed: FollowedGraph, blocks: Blocks, live: LiveTensors, known: StaticMemories, check: Check
) -> None:
    """Report wrong pointers of a graph that was just captured, and note what the others point to.

    ``followed`` receives its ``memories``; ``known`` has those that other graphs point to.
    """
    references = followed.references()
    addresses = [reference.pointer.address for reference in references if reference.is_set]
    followed.memories.update(known.find(addresses, live, blocks.at))
    look = partial(_look, followed, blocks, live)
    report_pointers(followed.record, references, look, check, " outside of the graph's pool")


def _look(followed: FollowedGraph, blocks: Blocks, live: LiveTensors, reference: Reference) -> Seen:
    """Return the kind of memory at an address, and what is wrong with it."""
    pointer = reference.pointer
    memory, block = followed.memories.get(pointer.address), blocks.at(pointer.address)
    if not reference.is_set:
        return "possibly unset", None
    if pointer.memory == "host":
        text = "points to pinned host memory that no tensor holds."
        is_owned = memory is not None or live.contain(pointer.address)
        return "host", None if is_owned else (FindingKind.UNOWNED_HOST_MEMORY, text, {})
    if memory is not None:
        return "weight" if memory.is_weight else "tensor", None
    if block is None:
        return "without an allocator", None
    if block.is_active:
        return "without a tensor", None
    if block.pool not in (DEFAULT_POOL, followed.pool):
        text = (
            "points to memory of another graph's pool that no tensor holds: replays of that graph "
            "overwrite it."
        )
        return "other pool", (FindingKind.OTHER_POOL, text, {})
    size = f"block of {block.end - block.begin:,} bytes"
    text = f"points to memory that was freed before the capture ended ({size})."
    return "freed", (FindingKind.FREED_MEMORY, text, {})


def check_references(followed: FollowedGraph, blocks: Blocks | None, check: Check) -> None:
    """Report memory that was freed or replaced since the capture.

    Without blocks, it looks at tensors alone and takes about a microsecond per address.
    """
    checked = 0
    for reference in followed.references():
        memory = followed.memories.get(reference.pointer.address)
        if not reference.is_set or (memory is None and reference.pointer.memory != "external"):
            continue
        checked += 1
        if memory is not None:
            _check_memory(reference, memory, blocks, check)
            continue
        block = None if blocks is None else blocks.at(reference.pointer.address)
        is_gone = blocks is not None and (block is None or not block.is_active)
        was_allocated = reference.pointer.name.startswith("external block")  # at the capture
        if is_gone and was_allocated:
            what = "was freed since the capture" if block else "is no longer mapped"
            text = f"points to memory without a tensor that {what}."
            reference.report(check, FindingKind.FREED_MEMORY, text)
    if blocks is not None:
        _check_pool(followed, blocks, check)
    check.text = f"{count_of(checked, 'address')} outside of the graph's pool"


def _check_pool(followed: FollowedGraph, blocks: Blocks, check: Check) -> None:
    """Report memory of the graph's own pool that is no longer mapped, as after a sleep."""
    for span in followed.kept:
        if blocks.is_mapped(span[0]):
            continue
        node, argument = Readers(followed.record.nodes).first(*span)
        what = "a node" if node is None or argument is None else argument_text(node, argument)
        check.report(
            FindingKind.FREED_MEMORY,
            f"{what} points to memory of the graph's pool that is no longer mapped.",
            node=node,
            argument=argument,
            cause=f"pool {followed.pool}",
            advice=_UNMAPPED_ADVICE,
        )


def _check_memory(
    reference: Reference, memory: StaticMemory, blocks: Blocks | None, check: Check
) -> None:
    replaced = memory.replaced_in()
    names = tuple(dict.fromkeys((*(holder.name for holder in memory.holders), memory.name)))
    has_name = memory.name != memory.shape
    cause = memory.name if has_name else f"{memory.name}; {reference.node.source}"
    facts: dict[str, Any] = {"names": names, "cause": f"memory of {cause}"}
    what = f"`{memory.name}`" + (f", {memory.shape}" if has_name else "")
    if replaced:
        state = "was freed" if memory.is_freed else "still exists and is what replays read"
        text = (
            f"points to the memory that {what} had at the capture. `{replaced}` is another tensor "
            f"now; the captured one {state}."
        )
        severity = "error" if memory.is_freed else "warning"
        facts |= {"severity": severity, "advice": _REPLACED_ADVICE}
        reference.report(check, FindingKind.REPLACED_BUFFER, text, **facts)
    elif memory.is_freed:
        text = f"points to the memory of a tensor that was freed since the capture ({what})."
        reference.report(check, FindingKind.FREED_MEMORY, text, **facts)
    elif (
        blocks is not None
        and reference.pointer.memory != "host"
        and not blocks.is_mapped(memory.begin)
    ):
        text = f"points to the memory of a tensor that is no longer mapped ({what})."
        facts["advice"] = _UNMAPPED_ADVICE
        reference.report(check, FindingKind.FREED_MEMORY, text, **facts)
