"""What the bytes of a kernel's arguments say.

A compiled kernel keeps the size of each parameter, not its type. So addresses are told from numbers
by what they lead to, and a number is shown as what it most probably is.
"""

from __future__ import annotations

import struct
import zlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass

from graphkit.graphs.walk.memory_map import MemoryMap
from graphkit.records import Argument, Pointer

_HIGHEST = 1 << 47
"""What is larger is no address of a process."""
_SMALL_INT = 1 << 24
"""An int beyond this is more probably a float."""


@dataclass(slots=True)
class Parameter:
    """One parameter of a kernel as it was captured.

    Attributes:
        offset: Where it begins among the kernel's parameters, in bytes.
        data: Its bytes; ``None`` if the driver does not give them.
        size: How many those are.
        name: What it is called, where that is known.
    """

    offset: int
    size: int
    data: bytes | None
    name: str = ""

    def addresses(self, lowest: int) -> list[tuple[int, int]]:
        """Every aligned eight bytes in it that may be an address, as offset and number."""
        words = array("Q", (self.data or b"")[: self.size // 8 * 8])
        return [(8 * i, word) for i, word in enumerate(words) if lowest <= word < _HIGHEST]


def decoded(parameter: Parameter, memory: MemoryMap) -> Argument:
    """The parameter as a record says it."""
    pointers = tuple(pointers_in(parameter, memory))
    if parameter.data is None:
        kind = text = "unreadable"
    elif parameter.size > 8:
        kind, text = "struct", _struct(parameter, pointers)
    elif pointers:
        kind, text = "pointer", pointers[0].name
    else:
        kind, text = "number", number(parameter.data)
    return Argument(
        name=parameter.name,
        offset=parameter.offset,
        size=parameter.size,
        kind=kind,
        text=text,
        pointers=pointers,
    )


def pointers_in(parameter: Parameter, memory: MemoryMap) -> Iterator[Pointer]:
    """The addresses in a parameter, those inside of structs and descriptors too."""
    for at, word in parameter.addresses(memory.lowest):
        found = memory.find(word, at)
        if found is not None:
            yield found


def number(data: bytes) -> str:
    """Up to eight bytes as the number that they most probably are."""
    whole = int.from_bytes(data, "little", signed=True)
    if abs(whole) < _SMALL_INT or len(data) not in (4, 8):
        return str(whole)
    (real,) = struct.unpack("<f" if len(data) == 4 else "<d", data)
    if 1e-12 < abs(real) < 1e12:
        return f"{real:.9g}"
    if len(data) == 8 and (whole >> 32, whole & 0xFFFFFFFF) != (0, whole):
        low, high = number(data[:4]), number(data[4:])
        return f"{low}, {high}"
    return str(whole)


def _struct(parameter: Parameter, pointers: tuple[Pointer, ...]) -> str:
    """Size and a digest of everything but addresses, which differ from run to run."""
    data = bytearray(parameter.data or b"")
    for pointer in pointers:
        data[pointer.offset : pointer.offset + 8] = bytes(8)
    if len(data) <= 16 and not pointers:
        return ", ".join(number(bytes(data[at : at + 4])) for at in range(0, len(data), 4))
    digest = f"{zlib.crc32(data):08x}"
    names = ", ".join(dict.fromkeys(pointer.name for pointer in pointers))
    return f"{parameter.size} bytes #{digest}" + (f": {names}" if names else "")
