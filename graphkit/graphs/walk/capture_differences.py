"""Where two captures of the same differ, byte by byte, and which of the bytes mean nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from graphkit.graphs.host_memory import UNSET_MARKER
from graphkit.graphs.walk.arguments import is_plain, number
from graphkit.graphs.walk.canonical_nodes import CanonicalArgument, CanonicalNode
from graphkit.graphs.walk.kernel_names import short_name


@dataclass(frozen=True, slots=True)
class CaptureDifference:
    """A place where two images of a graph differ.

    Attributes:
        node: Index of the node; that of the first that only one of them has.
        what: ``grid``, ``block``, ``kernel``, ``argument`` ...
        argument: Index of the argument; ``None`` if it is none.
        offset: Where in the argument, in bytes.
        before, after: The values, decoded.
    """

    node: int
    what: str
    before: str
    after: str
    argument: int | None = None
    offset: int | None = None


UnsetBytes = Mapping[tuple[int, int], frozenset[int]]
"""Bytes that mean nothing, by node and argument: torch leaves them as they were on the stack."""


def differing_bytes(*images: Sequence[CanonicalNode]) -> UnsetBytes:
    """The bytes in which images of equal captures differ."""
    found: dict[tuple[int, int], frozenset[int]] = {}
    first, *others = images
    for other in others:
        for key, before, after in _differing_arguments(first, other):
            found[key] = found.get(key, frozenset()) | _differing(before, after)
    return found


def filled_bytes(zeros: Sequence[CanonicalNode], other: Sequence[CanonicalNode]) -> UnsetBytes:
    """The bytes that hold what the stack was filled with.

    Args:
        zeros: The image of a capture that filled it with zeros.
        other: That of one that filled it with ``UNSET_MARKER``.
    """
    return {
        key: frozenset(i for i in _differing(before, after) if after[i] == UNSET_MARKER)
        for key, before, after in _differing_arguments(zeros, other)
    }


def _differing_arguments(
    one: Sequence[CanonicalNode], other: Sequence[CanonicalNode]
) -> Iterator[tuple[tuple[int, int], bytes, bytes]]:
    """Node and argument, and its bytes in both, of arguments that are bytes and differ."""
    for index, nodes in enumerate(zip(one, other, strict=False)):
        arguments = zip(nodes[0].arguments, nodes[1].arguments, strict=False)
        for place, (before, after) in enumerate(arguments):
            one_data, other_data = before.data, after.data
            if isinstance(one_data, str) or isinstance(other_data, str):
                continue
            if one_data != other_data:
                yield (index, place), one_data, other_data


def capture_differences(
    before: Sequence[CanonicalNode], after: Sequence[CanonicalNode], unset: UnsetBytes
) -> Iterator[CaptureDifference]:
    """Where two images differ, in the order of their nodes.

    Args:
        before: The one image.
        after: The other.
        unset: Bytes to pass over.
    """
    for index, (one, other) in enumerate(zip(before, after, strict=False)):
        if one == other:
            continue
        if one.name != other.name or len(one.arguments) != len(other.arguments):
            yield CaptureDifference(index, "kernel", short_name(one.name), short_name(other.name))
            continue
        for (what, value), (_, now) in zip(one.launch, other.launch, strict=True):
            if value != now:
                yield CaptureDifference(index, what, value, now)
        for place, both in enumerate(zip(one.arguments, other.arguments, strict=True)):
            yield from _of_argument(index, place, *both, unset.get((index, place), frozenset()))
    if len(before) != len(after):
        first = min(len(before), len(after))
        yield CaptureDifference(first, "number of nodes", str(len(before)), str(len(after)))


def _of_argument(
    node: int,
    place: int,
    before: CanonicalArgument,
    after: CanonicalArgument,
    unset: frozenset[int],
) -> Iterator[CaptureDifference]:
    one, other = before.data, after.data
    if one == other:
        for (address, held), (now, holds) in zip(before.constants, after.constants, strict=False):
            if address != now and held != holds:
                yield CaptureDifference(
                    node, "argument", f"constant {held}", f"constant {holds}", place
                )
        return
    if isinstance(one, str) or isinstance(other, str):
        yield CaptureDifference(node, "argument", str(one), str(other), place)
        return
    width = 8 if not unset and _is_one_number(one, other) else 4
    changed = _differing(one, other) - unset
    for at in sorted({byte // width * width for byte in changed}):
        values = number(one[at : at + width]), number(other[at : at + width])
        yield CaptureDifference(node, "argument", *values, place, at)


def _is_one_number(one: bytes, other: bytes) -> bool:
    """Whether bytes are eight that belong together, and not four beside four that nobody set."""
    both_halves = one[:4] != other[:4] and one[4:] != other[4:]
    return len(one) == 8 and (both_halves or (is_plain(one) and is_plain(other)))


def _differing(one: bytes, other: bytes) -> frozenset[int]:
    return frozenset(
        i for i, both in enumerate(zip(one, other, strict=False)) if both[0] != both[1]
    )
