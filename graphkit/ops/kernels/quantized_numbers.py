"""Numbers of eight and four bits, their scales and zero points, in kernels.

Products of few rows with numbers of four bits are limited by the conversion of the numbers, not by
memory, if the compiler generates it. ``nibble_ptx`` writes PTX for sm_90, checked on Triton 3.6.0
and 3.7.1. ``nibbles`` converts in Triton's interpreter, which runs no PTX, and to bfloat16 below
sm_90.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def scale_row(n, N: tl.constexpr, SCALE_ROWS: tl.constexpr):
    """Return the row of the scale of outputs."""
    row = n if SCALE_ROWS == N else n // 128
    if SCALE_ROWS == 1:
        row = n * 0
    return row


@triton.jit
def of_block(values, place, column, is_n, COLUMNS: tl.constexpr, IS_ALL: tl.constexpr):
    """Return a value of each output in a column of COLUMNS, 0 past them unless IS_ALL holds."""
    is_value = is_n if IS_ALL else is_n & (column < COLUMNS)
    return tl.load(values + place + column, mask=is_value, other=0)[:, None]


@triton.jit
def float8_numbers(loaded, dtype: tl.constexpr):
    """Return the numbers that bytes hold as float8_e4m3fn, in a dtype that has all of them.

    Through float32, since Triton 3.7 converts to bfloat16 by an instruction of a quarter of the
    speed.
    """
    return loaded.to(tl.float8e4nv, bitcast=True).to(tl.float32).to(dtype)


@triton.jit
def zero_offset(zero, dtype: tl.constexpr):
    """Return zero points plus the power of two that ``nibbles`` and ``nibble_ptx`` subtract."""
    POWER: tl.constexpr = 0x4300 if dtype == tl.bfloat16 else 0x6400
    return (zero.to(tl.int16) | POWER).to(dtype, bitcast=True)


@triton.jit
def nibbles(loaded, zero, dtype: tl.constexpr, SHIFT: tl.constexpr):
    """Return the number of four bits from bit SHIFT of each byte less its zero point, of a dtype.

    In 16 bits a number is the lowest bits of a power of two, 128 in bfloat16 and 1024 in float16,
    from which that power and the zero point are subtracted, exactly. A conversion of integers has
    a quarter of that speed.
    """
    number = loaded.to(tl.int16) >> SHIFT & 15
    if dtype == tl.float32:
        number = (number - zero.to(tl.int16)).to(dtype)
    else:
        number = zero_offset(number, dtype) - zero_offset(zero, dtype)
    return number


@triton.jit
def nibbles_by_ptx(loaded, zero, x, PTX: tl.constexpr, PACK: tl.constexpr):
    """Return what ``nibbles`` does, by PTX. Zero is None for 8, x points to the dtype."""
    dtype = x.dtype.element_ty
    OUT: tl.constexpr = "=&r" if PACK == 2 else "=&r,=&r"
    IN: tl.constexpr = ",h" if PACK == 2 else ",r"
    if zero is None:
        number = tl.inline_asm_elementwise(PTX, OUT + IN, [loaded], dtype, True, PACK)
    else:
        OFFSETS: tl.constexpr = ",r" if PACK == 2 else ",r,r"
        loaded, offset = tl.broadcast(loaded, zero_offset(zero, dtype))
        number = tl.inline_asm_elementwise(
            PTX, OUT + IN + OFFSETS, [loaded, offset], dtype, True, PACK
        )
    return number


def nibble_ptx(dtype: torch.dtype, pack: int, has_zeros: bool) -> tuple[str, str]:
    """Return PTX that converts ``pack`` bytes to their lower numbers, and to their upper ones.

    Operands are ``pack / 2`` registers of two results, a register of bytes, and ``pack / 2``
    registers of what ``zero_offset`` returns, if there are zero points. A register of results
    takes two bytes, each with four bits of a number, and the upper byte of the power of two above
    each of them, by one permutation of bytes, and subtracts two offsets. That is 11 instructions
    for 8 numbers, where the compiler emits about 25. PTX ISA: ``prmt``, ``sub{.bf16x2, .f16x2}``.

    Args:
        dtype: bfloat16 or float16.
        pack: 4, or 2 where a thread holds bytes in pairs: operands of a warpgroup's products.
        has_zeros: False for a zero point of 8.
    """
    power, eight, subtract = {
        torch.bfloat16: ("0x43434343", "0x43084308", "sub.rn.bf16x2"),
        torch.float16: ("0x64646464", "0x64086408", "sub.rn.f16x2"),
    }[dtype]
    pairs = pack // 2
    load = f"mov.b32 n, ${pairs};" if pack == 4 else f"cvt.u32.u16 n, ${pairs};"
    pack_up = ""
    for pair, order in list(enumerate(("0x4140", "0x4342")))[:pairs]:
        offset = f"${pairs + 1 + pair}" if has_zeros else "z"
        pack_up += f"prmt.b32 ${pair}, n, {power}, {order}; "
        pack_up += f"{subtract} ${pair}, ${pair}, {offset}; "
    low, high = (
        f"{{.reg .b32 n, z; mov.b32 z, {eight}; {load} {shift}and.b32 n, n, 0x0f0f0f0f; {pack_up}}}"
        for shift in ("", "shr.u32 n, n, 4; ")
    )
    return low, high
