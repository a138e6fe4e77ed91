"""Decoding of kernel arguments from their bytes.

A compiled kernel keeps the size of each parameter, not its type. So a value counts as an address if
it points to known memory, and a number is shown in its most probable type.
"""

from __future__ import annotations

import math
import struct
import zlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from graphkit.graphs.operations import Operand
from graphkit.graphs.walk.memory_map import MemoryMap
from graphkit.records import Argument, Pointer

_HIGHEST_ADDRESS = 1 << 47
"""End of a process's address space on 64-bit Linux."""
_SMALL_INT = 1 << 24
"""Beyond this a value is more probably a float than an int."""
_SMALLEST_FLOAT, _LARGEST_FLOAT = 1e-12, 1e12
"""Outside of these a value is more probably an int than a float."""
_FLOAT_FORMATS = {4: "<f", 8: "<d"}


@dataclass(slots=True)
class Parameter:
    """A parameter of a kernel with the value of its capture.

    Attributes:
        offset: Offset among the kernel's parameters, in bytes.
        size: Size in bytes.
        data: Its bytes; ``None`` if the driver does not give them.
        name: Its name; empty if unknown.
    """

    offset: int
    size: int
    data: bytes | None
    name: str = ""

    def addresses(self, lowest: int, shift: int = 0) -> list[tuple[int, int]]:
        """Return offset and value of every eight bytes that may be an address.

        Args:
            lowest: Smallest possible address.
            shift: Offset of the first eight bytes; the others follow it without gaps.
        """
        end = shift + max(self.size - shift, 0) // 8 * 8
        words = array("Q", (self.data or b"")[shift:end])
        return [
            (8 * i + shift, word)
            for i, word in enumerate(words)
            if lowest <= word < _HIGHEST_ADDRESS
        ]


def decode(parameter: Parameter, memory: MemoryMap, operands: Sequence[Operand] = ()) -> Argument:
    """Return the record of a parameter's value.

    Its kind is ``pointer``, ``number``, ``struct`` (more than eight bytes) or ``unreadable``.

    Args:
        parameter: The parameter.
        memory: Finds the memory of pointers.
        operands: Tensors of the operation that launched the kernel: they have the sizes of memory
            without a name, and those of views.
    """
    pointers = tuple(_with_size(pointer, operands) for pointer in pointers_in(parameter, memory))
    if parameter.data is None:
        kind = text = "unreadable"
    elif parameter.size > 8:
        kind, text = "struct", _struct_text(parameter, pointers)
    elif pointers:
        kind, text = "pointer", pointers[0].name
    else:
        kind, text = "number", number_text(parameter.data)
    return Argument(
        name=parameter.name,
        offset=parameter.offset,
        size=parameter.size,
        kind=kind,
        text=text,
        pointers=pointers,
    )


def pointers_in(parameter: Parameter, memory: MemoryMap) -> Iterator[Pointer]:
    """Yield the pointers in a parameter, also those inside of structs and descriptors."""
    for offset, address in parameter.addresses(memory.lowest):
        pointer = memory.find(address, offset)
        if pointer is not None:
            yield pointer


def _with_size(pointer: Pointer, operands: Sequence[Operand]) -> Pointer:
    at = pointer.address
    rests = [begin + size - at for begin, size in operands if begin <= at]
    return replace(pointer, size=min((rest for rest in rests if rest > 0), default=pointer.size))


def number_text(data: bytes) -> str:
    """Return up to eight bytes as the int, the float or the two numbers that they probably are."""
    integer, real = _integer(data), _real(data)
    if math.isinf(real):
        return str(real)
    if abs(integer) < _SMALL_INT:
        return str(integer)
    if _is_short_float(data):
        return f"{real:.6g}"
    halves = (data[:4], data[4:]) if len(data) == 8 and integer >> 32 else ()
    if halves and (not _is_probable_float(real) or all(map(has_short_form, halves))):
        return ", ".join(map(number_text, halves))
    return f"{real:.9g}" if _is_probable_float(real) else str(integer)


def has_short_form(data: bytes) -> bool:
    """Return whether the bytes are a small int or a float of at most six digits."""
    return abs(_integer(data)) < _SMALL_INT or _is_short_float(data)


def _is_short_float(data: bytes) -> bool:
    real = _real(data)
    if not _is_probable_float(real):
        return False
    return struct.pack(_FLOAT_FORMATS[len(data)], float(f"{real:.6g}")) == data


def _is_probable_float(real: float) -> bool:
    return _SMALLEST_FLOAT < abs(real) < _LARGEST_FLOAT


def _integer(data: bytes) -> int:
    return int.from_bytes(data, "little", signed=True)


def _real(data: bytes) -> float:
    """Return the bytes as a float; NaN if no float has that size."""
    form = _FLOAT_FORMATS.get(len(data))
    return math.nan if form is None else float(struct.unpack(form, data)[0])


def _struct_text(parameter: Parameter, pointers: tuple[Pointer, ...]) -> str:
    """Return a struct's numbers, or its size, a digest without addresses, and its pointers."""
    data = bytearray(parameter.data or b"")
    for pointer in pointers:
        data[pointer.offset : pointer.offset + 8] = bytes(8)
    if len(data) <= 16 and not pointers:  # four numbers fit in a line
        return ", ".join(number_text(bytes(data[at : at + 4])) for at in range(0, len(data), 4))
    digest = f"{zlib.crc32(data):08x}"
    names = ", ".join(dict.fromkeys(pointer.name for pointer in pointers))
    return f"{parameter.size} bytes #{digest}" + (f": {names}" if names else "")
