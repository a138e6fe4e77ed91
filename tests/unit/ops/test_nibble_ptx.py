"""The PTX that converts numbers of four bits, run instruction by instruction for every byte."""

from __future__ import annotations

import pytest
import torch

from graphkit.ops.kernels.quantized_numbers import nibble_ptx

UNITS = {torch.bfloat16: 64, torch.float16: 512}


def halves(word, dtype):
    """Return the two numbers of a register."""
    pair = torch.tensor([word & 0xFFFF, word >> 16], dtype=torch.int32).to(torch.int16)
    return pair.view(dtype).double()


def register(numbers, dtype):
    """Return a register of two numbers, which must be exact."""
    rounded = numbers.to(dtype)
    assert torch.equal(rounded.double(), numbers)
    low, high = (int(each) & 0xFFFF for each in rounded.view(torch.int16))
    return low | high << 16


def run(code, operands, dtype):
    """Run PTX of ``mov``, ``cvt``, ``and``, ``prmt`` and ``fma`` over registers by name."""
    values = dict(operands)

    def read(name):
        return values[name] if name in values else int(name, 0)

    for line in code.strip("{}").split(";"):
        instruction, _, rest = line.strip().partition(" ")
        if not instruction or instruction == ".reg":
            continue
        to, *sources = (each.strip() for each in rest.split(","))
        source = [read(each) for each in sources]
        kind, *details = instruction.split(".")
        if kind == "mov" or instruction == "cvt.u32.u16":
            values[to] = source[0]
        elif instruction == "and.b32":
            values[to] = source[0] & source[1]
        elif instruction == "prmt.b32":
            both = (source[0] | source[1] << 32).to_bytes(8, "little")
            order = [source[2] >> 4 * place & 7 for place in range(4)]
            values[to] = int.from_bytes(bytes(both[each] for each in order), "little")
        else:
            assert [kind, *details] == ["fma", "rn", dtype]
            name = {"bf16x2": torch.bfloat16, "f16x2": torch.float16}[dtype]
            a, b, c = (halves(each, name) for each in source)
            values[to] = register(a * b + c, name)
    return values


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("pack", [2, 4])
@pytest.mark.parametrize("zero", [None, 0, 7, 15])
def test_every_byte_becomes_its_two_numbers(dtype, pack, zero):
    units, pairs = UNITS[dtype], pack // 2
    suffix = {torch.bfloat16: "bf16x2", torch.float16: "f16x2"}[dtype]
    codes = nibble_ptx(dtype, pack, has_zeros=zero is not None)
    for first in range(256):
        numbers = [first, *((first * 37 + 11 * place) % 256 for place in range(1, pack))]
        operands = {f"${pairs}": int.from_bytes(bytes(numbers), "little")}
        for pair in range(pairs if zero is not None else 0):
            offset = torch.full((2,), -zero / units, dtype=torch.float64)
            operands[f"${pairs + 1 + pair}"] = register(offset, dtype)
        for code, shift in zip(codes, (0, 4), strict=True):
            values = run(code, operands, suffix)
            got = torch.cat([halves(values[f"${pair}"], dtype) for pair in range(pairs)]) * units
            expected = [(each >> shift & 15) - (8 if zero is None else zero) for each in numbers]
            assert got.tolist() == expected
