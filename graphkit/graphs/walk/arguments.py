"""What the bytes of a kernel's arguments say.

A compiled kernel keeps the size of each parameter, not its type. So addresses are told from numbers
by what they lead to, and a number is shown as what it most probably is.
"""

from __future__ import annotations

import math
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
_LEAST, _MOST = 1e-12, 1e12
"""A float beyond these is more probably an int."""
_REALS = {4: "<f", 8: "<d"}


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

    def addresses(self, lowest: int, shift: int = 0) -> list[tuple[int, int]]:
        """Every eight bytes in it that may be an address, as offset and number.

        Args:
            lowest: No smaller number is one.
            shift: How far from aligned they stand.
        """
        end = shift + max(self.size - shift, 0) // 8 * 8
        words = array("Q", (self.data or b"")[shift:end])
        return [(8 * i + shift, word) for i, word in enumerate(words) if lowest <= word < _HIGHEST]


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
    """Up to eight bytes as the number, or the two numbers, that they most probably are."""
    whole, real = _whole(data), _real(data)
    if math.isinf(real):
        return str(real)
    if abs(whole) < _SMALL_INT:
        return str(whole)
    if _has_few_digits(data):
        return f"{real:.6g}"
    halves = (data[:4], data[4:]) if len(data) == 8 and whole >> 32 else ()
    if halves and (not _is_likely(real) or all(map(is_plain, halves))):
        return ", ".join(map(number, halves))
    return f"{real:.9g}" if _is_likely(real) else str(whole)


def is_plain(data: bytes) -> bool:
    """Whether it is a number such as people write."""
    return abs(_whole(data)) < _SMALL_INT or _has_few_digits(data)


def _has_few_digits(data: bytes) -> bool:
    real = _real(data)
    return _is_likely(real) and struct.pack(_REALS[len(data)], float(f"{real:.6g}")) == data


def _is_likely(real: float) -> bool:
    return _LEAST < abs(real) < _MOST


def _whole(data: bytes) -> int:
    return int.from_bytes(data, "little", signed=True)


def _real(data: bytes) -> float:
    """As a float; not a number if none is of that size."""
    form = _REALS.get(len(data))
    return math.nan if form is None else float(struct.unpack(form, data)[0])


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
