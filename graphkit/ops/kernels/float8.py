"""Conversion of float8_e4m3fn in kernels, two numbers at a time.

A word of 16 bits holds two numbers. Matrices of words take the way of float16 through shared memory
to the tensor cores, and are converted in registers. Matrices of bytes would be read from shared
memory a byte at a time. Numbers become float16, which has all of them: an instruction converts two.
To bfloat16 each takes an instruction of a quarter of the speed.
"""

import triton
import triton.language as tl


@triton.jit
def float8_pairs(words, HAS_CVT: tl.constexpr):
    """Return the numbers in the lower and the upper bytes of words, both in float16, exactly.

    Args:
        words: int16, of any shape.
        HAS_CVT: ``has_float8_cvt`` of the device. Without it NaN becomes 480.
    """
    if HAS_CVT:
        lower, upper = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 bytes;
            .reg .b16 lower, upper;
            prmt.b32 bytes, $2, 0, 0x3120;
            mov.b32 {lower, upper}, bytes;
            cvt.rn.f16x2.e4m3x2 $0, lower;
            cvt.rn.f16x2.e4m3x2 $1, upper;
            }
            """,
            "=r,=r,r",
            [words],
            (tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        # Exponents have a bias of 7, in float16 of 15: as its bits a number is smaller by 2**8.
        lower = ((words << 8) & -0x8000) | ((words << 7) & 0x3F80)
        upper = (words & -0x8000) | ((words >> 1) & 0x3F80)
        lower = lower.to(tl.int16).to(tl.float16, bitcast=True) * 256.0
        upper = upper.to(tl.int16).to(tl.float16, bitcast=True) * 256.0
    return lower, upper
