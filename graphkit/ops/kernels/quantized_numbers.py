"""Numbers of eight and four bits, their scales and zero points, in kernels.

Products of few rows with numbers of four bits are limited by the conversion of the numbers, not by
memory, if the compiler generates it. ``nibble_ptx`` writes PTX, checked on Triton 3.6.0 and 3.7.1.
``nibbles`` converts where no PTX runs, as in Triton's interpreter.
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
def nibbles(loaded, zero, dtype: tl.constexpr, SHIFT: tl.constexpr):
    """Return the number of four bits from bit SHIFT of each byte less its zero point."""
    number = loaded.to(tl.int16) >> SHIFT & 15
    return (number - zero.to(tl.int16)).to(dtype)


@triton.jit
def nibble_units(dtype: tl.constexpr):
    """Return the number by which ``nibble_ptx`` divides its results."""
    return 64.0 if dtype == tl.bfloat16 else 512.0


@triton.jit
def zero_offset(zero, dtype: tl.constexpr):
    """Return zero points as ``nibble_ptx`` adds them: negative, divided by ``nibble_units``."""
    return (zero.to(tl.float32) * (-1.0 / nibble_units(dtype))).to(dtype)


@triton.jit
def nibbles_by_ptx(loaded, zero, x, PTX: tl.constexpr, PACK: tl.constexpr):
    """Return the numbers of ``nibbles`` divided by ``nibble_units``, by code of ``nibble_ptx``.

    ``zero`` is None for a zero point of 8. The dtype is that of the elements of ``x``.
    """
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
    registers of what ``zero_offset`` returns, if there are zero points.

    Results are divided by ``nibble_units``: 64 in bfloat16, 512 in float16. They are exact.

    A 16-bit float whose lower byte is b and whose upper byte is 0 has the value b times the
    smallest positive number, 2^-133 in bfloat16 and 2^-24 in float16. If only the upper four bits
    of b are kept, the value is 16 times the upper number. An ``fma`` scales a value by a power of
    two and adds the zero point. For the lower number, a second one subtracts the upper bits.
    Eight numbers take four bit instructions, which run at half of the speed, and six ``fma``. PTX
    ISA: ``prmt``, ``fma{.bf16x2, .f16x2}``, which support subnormal numbers.

    Args:
        dtype: bfloat16 or float16.
        pack: 4, or 2 where a thread holds bytes in pairs: operands of a warpgroup's products.
        has_zeros: False for a zero point of 8.
    """
    byte, upper, minus_byte, minus_eight, fma = {
        torch.bfloat16: ("0x7f007f00", "0x7d007d00", "0xff00ff00", "0xbe00be00", "fma.rn.bf16x2"),
        torch.float16: ("0x78007800", "0x68006800", "0xf800f800", "0xa400a400", "fma.rn.f16x2"),
    }[dtype]
    pairs = pack // 2
    load = f"mov.b32 n, ${pairs};" if pack == 4 else f"cvt.u32.u16 n, ${pairs};"
    low, high = "", ""
    for pair, order in list(enumerate(("0x4140", "0x4342")))[:pairs]:
        offset = f"${pairs + 1 + pair}" if has_zeros else minus_eight
        # The compiler of PTX shares these between both.
        spread = f"prmt.b32 w, n, 0, {order}; and.b32 h, w, 0x00f000f0; mov.b32 z, {offset}; "
        low += f"{spread}mov.b32 f, {byte}; {fma} ${pair}, w, f, z; "
        low += f"mov.b32 f, {minus_byte}; {fma} ${pair}, h, f, ${pair}; "
        high += f"{spread}mov.b32 f, {upper}; {fma} ${pair}, h, f, z; "
    registers = ".reg .b32 n, w, h, f, z;"
    return f"{{{registers} {load} {low}}}", f"{{{registers} {load} {high}}}"
