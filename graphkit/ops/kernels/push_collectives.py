"""Collectives of small tensors over GPUs that write to the memory of each other.

Each rank writes its words into a part of every other rank's memory, each word together with the
stamp of the call. A rank that reads the stamp of this call has the word too, because both are in
the same 8 bytes of a store (the protocol LL of NCCL). It doubles the bytes and needs no barrier,
which takes most of the time of a small collective.

Kernels are in Gluon, whose explicit layouts keep numbers, words and stamps in the same thread:
accesses have 8 or 16 bytes, and each thread polls the words that it adds up. Words are written and
polled in pairs. If the number of words is odd, the last pair has a second word that nothing uses.

Calls are counted by span of the memory, because they may use different spans. Those of a span use
two parts per pair of ranks in turn. A rank writes the words of call n + 2 where those of call n
were. It then has the words of call n + 1 of all others, who had read those of call n before they
wrote them.

The stamp of a call is its number with the lowest bit set: the two parts are separate memory, so
that calls n and n + 1 may share a stamp. It is never 0, the content of memory that no call wrote,
also after the number wraps around.
"""

from typing import Any, NamedTuple

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from graphkit.ops.kernels.gluon_launch import gdc_launch_dependents, gdc_wait, run_ptx
from graphkit.ops.kernels.launch import KEPT_IN_L2, launch

WORD = 4
"""Bytes of a word: a float32 number or two bfloat16 numbers."""
SPAN = 1024
"""Words of a span. A program has whole spans."""
MOST_SPANS = 16
"""Most spans of a program."""
WORDS_OF_WARP = 128
"""Words of a warp, 4 of each thread."""


class PushMemory(NamedTuple):
    """Memory of a group of ranks for words that they push.

    Attributes:
        calls: Calls so far by span, modulo 2**32, int32 [capacity / SPAN].
        parts: Address of the memory of each rank, int64 [R]. It has 2 x R parts of ``capacity``
            words of 8 bytes, 0 before the first call.
        rank: This rank.
        capacity: Words of a part.
    """

    calls: torch.Tensor
    parts: torch.Tensor
    rank: int
    capacity: int

    def holds(self, rows: int, words: int) -> bool:
        """Return whether a part has room for rows of so many words."""
        spans = -(-words // SPAN)
        return 0 < spans <= MOST_SPANS and rows * spans * SPAN <= self.capacity


# Operands: four results that nothing reads, addresses, words, stamps, and whether each is a word.
# The first word of a pair has the address of both, and decides whether they are written.
_PUSH = gl.constexpr("""{
.reg .pred is_pair;
setp.ne.b32 is_pair, $16, 0;
@is_pair st.relaxed.sys.global.v4.b32 [$4], {$8, $12, $9, $13};
setp.ne.b32 is_pair, $18, 0;
@is_pair st.relaxed.sys.global.v4.b32 [$6], {$10, $14, $11, $15};
mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;
}""")
# Operands: words, their addresses, the stamps to wait for, and whether each is a word; as above.
_POLL = gl.constexpr("""{
.reg .pred is_first, is_second, is_late;
.reg .b32 a, b, c, d;
setp.ne.b32 is_first, $12, 0;
setp.ne.b32 is_second, $14, 0;
mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;
mov.b32 a, $8; mov.b32 b, $9; mov.b32 c, $10; mov.b32 d, $11;
POLL:
@is_first ld.relaxed.sys.global.v4.b32 {$0, a, $1, b}, [$4];
@is_second ld.relaxed.sys.global.v4.b32 {$2, c, $3, d}, [$6];
setp.ne.b32 is_late, a, $8;
setp.ne.or.b32 is_late, b, $9, is_late;
setp.ne.or.b32 is_late, c, $10, is_late;
setp.ne.or.b32 is_late, d, $11, is_late;
@is_late bra POLL;
}""")


@gluon.jit
def _memory_of(parts, rank):
    """Return the memory of a rank."""
    address = gl.load(parts + rank, eviction_policy=KEPT_IN_L2)
    return address.to(gl.pointer_type(gl.int64), bitcast=True)


@gluon.jit
def _push(target, word, stamp, is_word):
    """Write words with their stamps, two words at a time."""
    gl.inline_asm_elementwise(
        _PUSH, "=&r,=&r,=&r,=&r,l,l,l,l,r,r,r,r,r,r,r,r,r,r,r,r,~{memory}",
        [target, word, stamp, is_word.to(gl.int32)], dtype=gl.int32, is_pure=False, pack=4,
    )  # fmt: skip


@gluon.jit
def _received(source, stamp, is_word):
    """Return words as soon as they have their stamps. Each thread waits for its own words."""
    return gl.inline_asm_elementwise(
        _POLL, "=&r,=&r,=&r,=&r,l,l,l,l,r,r,r,r,r,r,r,r", [source, stamp, is_word.to(gl.int32)],
        dtype=gl.int32, is_pure=False, pack=4,
    )  # fmt: skip


@gluon.jit
def _wait_for_threads():
    """Wait until all threads of the program are here."""
    run_ptx("bar.sync 0; mov.b32 $0, 0;")


@gluon.jit
def _words_of(number, dtype: gl.constexpr, words: gl.constexpr):
    """Return numbers as words, in a layout that needs no exchange between threads."""
    if dtype == gl.float32:
        word = number.to(gl.int32, bitcast=True)
    else:
        pairs = gl.reshape(number.to(gl.int16, bitcast=True), [number.shape[0] // 2, 2])
        low, high = gl.split(pairs)
        word = (high.to(gl.int32) << 16) | (low.to(gl.int32) & 0xFFFF)
    return gl.convert_layout(word, words, assert_trivial=True)


@gluon.jit
def _numbers_of(word, dtype: gl.constexpr, numbers: gl.constexpr):
    """Return the numbers of words in float32, without an exchange between threads, too."""
    if dtype == gl.float32:
        number = word.to(gl.float32, bitcast=True)
    else:
        low, high = word << 16, word & -65536
        pairs = gl.join(low.to(gl.float32, bitcast=True), high.to(gl.float32, bitcast=True))
        number = gl.reshape(pairs, [2 * word.shape[0]])
    return gl.convert_layout(number, numbers, assert_trivial=True)


@gluon.jit
def push_all_reduce_kernel(
    out, total, x, residual, weight, eps, calls, parts, size,
    ROW: gl.constexpr, BLOCK: gl.constexpr, SPANS: gl.constexpr, SPAN: gl.constexpr,
    SUMMANDS: gl.constexpr, RANK: gl.constexpr, RANKS: gl.constexpr, CAPACITY: gl.constexpr,
    IS_WHOLE: gl.constexpr, STARTS_EARLY: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """One program per row of ROW words, of ``size`` numbers in all.

    The last row is shorter unless IS_WHOLE holds. ``x`` has the numbers of this rank, or with whole
    rows SUMMANDS float32 summands of each. With ``residual``, ``out`` is the norm of ``total``, the
    sum over ranks plus ``residual``, all rounded as in ``add_rms_norm``. Otherwise it is the sum
    over ranks.
    """
    dtype: gl.constexpr = out.dtype.element_ty
    OF_WORD: gl.constexpr = 32 // dtype.primitive_bitwidth
    WIDTH: gl.constexpr = ROW * OF_WORD
    words: gl.constexpr = gl.BlockedLayout([2], [32], [WARPS], [0])
    numbers: gl.constexpr = gl.BlockedLayout([2 * OF_WORD], [32], [WARPS], [0])
    row, word = gl.program_id(0), gl.arange(0, BLOCK, words)
    column = gl.arange(0, BLOCK * OF_WORD, numbers)
    number = row * WIDTH + column
    is_word, is_number = word < ROW, column < WIDTH
    if not IS_WHOLE:
        is_word &= (row * ROW + word) * OF_WORD < size
        is_number &= number < size
    if residual is not None:
        factor = gl.load(weight + column, mask=column < WIDTH, other=0.0)
    if STARTS_EARLY:
        gdc_launch_dependents()
        gdc_wait()
    mine = _memory_of(parts, RANK)
    own_call = calls + row * SPANS + word // SPAN
    call = gl.load(own_call, mask=word < SPANS * SPAN, other=0, eviction_policy=KEPT_IN_L2)
    own = gl.load(x + number, mask=is_number, other=0.0)
    for summand in gl.static_range(1, SUMMANDS):
        further = x + summand * gl.num_programs(0) * WIDTH + number
        own += gl.load(further, mask=is_number, other=0.0)
    own = own.to(dtype)
    own_word, stamp = _words_of(own, dtype, words), call | 1
    place = (call & 1) * (RANKS * CAPACITY) + row * (SPANS * SPAN) + word
    for peer in gl.static_range(RANKS):
        if peer != RANK:
            _push(_memory_of(parts, peer) + RANK * CAPACITY + place, own_word, stamp, is_word)
    if residual is not None:  # while the words of other ranks arrive
        before = gl.load(
            residual + number, mask=is_number, other=0.0, eviction_policy=KEPT_IN_L2
        ).to(gl.float32)
    summed = gl.zeros([BLOCK * OF_WORD], gl.float32, numbers)
    for rank in gl.static_range(RANKS):  # in this order everywhere: the sums have the same bits
        if rank == RANK:
            summed += own.to(gl.float32)
        else:
            theirs = _received(mine + rank * CAPACITY + place, stamp, is_word)
            summed += _numbers_of(theirs, dtype, numbers)
    result = summed.to(dtype)
    if residual is not None:
        result = (before + result.to(gl.float32)).to(dtype)
        gl.store(total + number, result, mask=is_number, eviction_policy=KEPT_IN_L2)
        wide = result.to(gl.float32)
        scale = gl.rsqrt(gl.sum(wide * wide, 0) / WIDTH + eps)
        # As ``normalised`` of ``graphkit.ops.kernels.decoder``, which Gluon cannot call.
        result = (wide * scale).to(dtype)
        result = (result.to(gl.float32) * factor.to(gl.float32)).to(dtype)
    gl.store(out + number, result, mask=is_number)
    _wait_for_threads()  # all have read the numbers of the calls
    gl.store(own_call, call + 1, mask=is_word & (word % SPAN == 0), eviction_policy=KEPT_IN_L2)


@gluon.jit
def push_all_gather_kernel(
    out, x, calls, parts, size,
    ROW: gl.constexpr, SPAN: gl.constexpr, RANK: gl.constexpr, RANKS: gl.constexpr,
    CAPACITY: gl.constexpr, STARTS_EARLY: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """One program per SPAN of the ``size`` words of ``x``, whose rows have ROW words."""
    words: gl.constexpr = gl.BlockedLayout([2], [32], [WARPS], [0])
    place = gl.program_id(0) * SPAN + gl.arange(0, SPAN, words)
    is_word = place < size
    if STARTS_EARLY:
        gdc_launch_dependents()
        gdc_wait()
    mine, own_call = _memory_of(parts, RANK), calls + place // SPAN
    call = gl.load(own_call, eviction_policy=KEPT_IN_L2)
    own, stamp = gl.load(x + place, mask=is_word, other=0), call | 1
    target = (call & 1) * (RANKS * CAPACITY) + place
    for peer in gl.static_range(RANKS):
        if peer != RANK:
            _push(_memory_of(parts, peer) + RANK * CAPACITY + target, own, stamp, is_word)
    begin = out + (place // ROW).to(gl.int64) * (RANKS * ROW) + place % ROW
    for rank in gl.static_range(RANKS):
        theirs = own
        if rank != RANK:
            theirs = _received(mine + rank * CAPACITY + target, stamp, is_word)
        gl.store(begin + rank * ROW, theirs, mask=is_word)
    _wait_for_threads()  # all have read the number of the call
    gl.store(own_call, call + 1, mask=place % SPAN == 0, eviction_policy=KEPT_IN_L2)


def launch_push_all_reduce(x: torch.Tensor, memory: PushMemory) -> torch.Tensor:
    """Return the sum over ranks, with the same bits on each.

    Args:
        x: Contiguous float32 or bfloat16, of at most ``memory.capacity`` words.
        memory: The memory of the ranks.
    """
    out = torch.empty_like(x)
    _launch_all_reduce(memory, out, x, SPAN)
    return out


def launch_push_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, memory: PushMemory
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``add_rms_norm`` of the sum over ranks, with the same bits on each.

    Args:
        x: Rows [T, H] that ``memory`` holds, or float32 summands of them [S, T, H]; contiguous.
        residual: [T, H], contiguous, float32 or bfloat16.
        weight: [H], of the same dtype.
        eps: As in ``add_rms_norm``.
        memory: The memory of the ranks.
    """
    out, total = torch.empty_like(residual), torch.empty_like(residual)
    row = residual.shape[1] * residual.itemsize // WORD
    _launch_all_reduce(memory, out, x, row, total, residual, weight, eps)
    return out, total


def launch_push_all_gather(x: torch.Tensor, memory: PushMemory) -> torch.Tensor:
    """Return the columns of all ranks side by side: [T, P] of each rank as [T, R * P].

    Args:
        x: Contiguous, of at most ``memory.capacity`` words; a row has whole words.
        memory: The memory of the ranks.
    """
    tokens, columns = x.shape
    out = x.new_empty(tokens, len(memory.parts) * columns)
    row = columns * x.itemsize // WORD
    launch(
        push_all_gather_kernel, (triton.cdiv(tokens * row, SPAN),), memory,
        out=_in_words(out), x=_in_words(x), size=tokens * row, ROW=row,
        **_constants(memory, SPAN),
    )  # fmt: skip
    return out


def _launch_all_reduce(
    memory: PushMemory,
    out: torch.Tensor,
    x: torch.Tensor,
    row: int,
    total: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    eps: float = 0.0,
) -> None:
    words, block = out.numel() * out.itemsize // WORD, triton.next_power_of_2(row)
    block = max(WORDS_OF_WARP, block)
    has_summands = x.dim() > out.dim()
    launch(
        push_all_reduce_kernel, (triton.cdiv(words, row),), memory,
        out=out, total=total, x=x, residual=residual, weight=weight, eps=eps, size=out.numel(),
        ROW=row, BLOCK=block, SPANS=triton.cdiv(row, SPAN), IS_WHOLE=words % row == 0,
        SUMMANDS=len(x) if has_summands else 1, **_constants(memory, block),
    )  # fmt: skip


def _constants(memory: PushMemory, block: int) -> dict[str, Any]:
    """Return what both kernels are given, whose programs have so many words."""
    warps = min(32, block // WORDS_OF_WARP)
    return {
        "SPAN": SPAN, "RANK": memory.rank, "RANKS": len(memory.parts),
        "CAPACITY": memory.capacity, "WARPS": warps, "num_warps": warps,
    }  # fmt: skip


def _in_words(x: torch.Tensor) -> torch.Tensor:
    return x.view(-1).view(torch.int32)
