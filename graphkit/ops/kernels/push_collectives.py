"""Collectives of small tensors over GPUs that write to the memory of each other.

Each rank writes its words into a part of every other rank's memory, each word together with the
stamp of the call. A rank that reads the stamp of this call has the word too, because both arrive
in one store of 8 bytes (the protocol LL of NCCL). It doubles the bytes and needs no barrier, which
takes most of the time of a small collective.

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
import triton.language as tl

from graphkit.ops.kernels.decoder import normalised, sum_of_parts
from graphkit.ops.kernels.launch import KEPT_IN_L2, launch

WORD = 4
"""Bytes of a word: a float32 number or two bfloat16 numbers."""
SPAN = 1024
"""Words of a span. A program has whole spans."""
MOST_SPANS = 16
"""Most spans of a program."""


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


@triton.jit
def _push(own, place, is_word, call, parts, RANK, RANKS: tl.constexpr, CAPACITY):
    """Write words into the memory of all other ranks."""
    stamp = (call | 1).to(tl.int64) << 32
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            theirs = tl.load(parts + peer, eviction_policy=KEPT_IN_L2)
            theirs = theirs.to(tl.pointer_type(tl.int64))
            target = theirs + ((call & 1) * RANKS + RANK) * CAPACITY + place
            tl.store(target, stamp | (own.to(tl.int64) & 0xFFFFFFFF), mask=is_word)


@triton.jit
def _received(rank, place, is_word, call, parts, RANK, RANKS, CAPACITY):
    """Wait for the words of another rank and return them."""
    stamp = (call | 1).to(tl.int64) << 32
    mine = tl.load(parts + RANK, eviction_policy=KEPT_IN_L2).to(tl.pointer_type(tl.int64))
    source = mine + ((call & 1) * RANKS + rank) * CAPACITY + place
    got = tl.load(source, mask=is_word, other=stamp, volatile=True)
    while tl.max(((got >> 32) != (stamp >> 32)).to(tl.int32), 0) != 0:
        got = tl.load(source, mask=is_word, other=stamp, volatile=True)
    return got.to(tl.int32)


@triton.jit
def _numbers(word, DTYPE: tl.constexpr):
    """Return the numbers of words, in float32; the second ones of float32 words are 0."""
    if DTYPE.primitive_bitwidth == 32:
        first = word.to(tl.float32, bitcast=True)
        second = tl.zeros_like(first)
    else:
        first = (word << 16).to(tl.float32, bitcast=True)
        second = (word & -65536).to(tl.float32, bitcast=True)
    return first, second


@triton.jit
def _words(first, second):
    """Return the words of numbers, whose dtype is that of the tensor."""
    if first.dtype == tl.float32:
        word = first.to(tl.int32, bitcast=True)
    else:
        low = first.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        word = (second.to(tl.int16, bitcast=True).to(tl.int32) << 16) | low
    return word


@triton.jit
def _own_words(x, word, words, is_word, SUMMANDS: tl.constexpr, DTYPE: tl.constexpr):
    """Return this rank's words. ``x`` has these, or SUMMANDS float32 summands of each number."""
    if SUMMANDS == 0:
        own = tl.load(x + word, mask=is_word, other=0)
    elif DTYPE.primitive_bitwidth == 32:
        first = sum_of_parts(x + word, words, is_word, SUMMANDS, DTYPE)
        own = _words(first, first)
    else:
        first = sum_of_parts(x + 2 * word, 2 * words, is_word, SUMMANDS, DTYPE)
        second = sum_of_parts(x + 2 * word + 1, 2 * words, is_word, SUMMANDS, DTYPE)
        own = _words(first, second)
    return own


@triton.jit
def push_all_reduce_kernel(
    out, total, x, residual, weight, eps, calls, parts, words,
    ROW: tl.constexpr, BLOCK: tl.constexpr, SPANS: tl.constexpr, SPAN: tl.constexpr,
    SUMMANDS: tl.constexpr, DTYPE: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr,
    CAPACITY: tl.constexpr, STARTS_EARLY: tl.constexpr,
):  # fmt: skip
    """One program per row of ROW words; see ``_own_words`` for ``x``.

    All tensors but ``x``, ``calls`` and ``parts`` are words. With ``residual``, ``out`` is the norm
    of ``total``, the sum over ranks plus ``residual``, all rounded as in ``add_rms_norm``.
    Otherwise it is the sum over ranks.
    """
    if STARTS_EARLY:
        tl.extra.cuda.gdc_wait()
    row, lane = tl.program_id(0), tl.arange(0, BLOCK)
    word, place = row * ROW + lane, row * SPANS * SPAN + lane
    is_word = (lane < ROW) & (word < words)
    span = row * SPANS + tl.arange(0, triton.next_power_of_2(SPANS))
    is_span = span < (row + 1) * SPANS
    count = tl.load(calls + span, mask=is_span, eviction_policy=KEPT_IN_L2)
    call = tl.load(calls + place // SPAN, mask=is_word, eviction_policy=KEPT_IN_L2)
    own = _own_words(x, word, words, is_word, SUMMANDS, DTYPE)
    _push(own, place, is_word, call, parts, RANK, RANKS, CAPACITY)
    if residual is not None:  # while the words of other ranks arrive
        before = tl.load(residual + word, mask=is_word, other=0, eviction_policy=KEPT_IN_L2)
        factor = tl.load(weight + lane, mask=is_word, other=0, eviction_policy=KEPT_IN_L2)
    first = tl.zeros([BLOCK], tl.float32)
    second = tl.zeros([BLOCK], tl.float32)
    for rank in tl.static_range(RANKS):  # in this order everywhere: the sums have the same bits
        theirs = own
        if rank != RANK:
            theirs = _received(rank, place, is_word, call, parts, RANK, RANKS, CAPACITY)
        one, two = _numbers(theirs, DTYPE)
        first += one
        second += two
    if STARTS_EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    first, second = first.to(DTYPE), second.to(DTYPE)
    if residual is not None:
        one, two = _numbers(before, DTYPE)
        first = (one + first.to(tl.float32)).to(DTYPE)
        second = (two + second.to(tl.float32)).to(DTYPE)
        tl.store(total + word, _words(first, second), mask=is_word, eviction_policy=KEPT_IN_L2)
        one, two = first.to(tl.float32), second.to(tl.float32)
        width: tl.constexpr = ROW * 32 // DTYPE.primitive_bitwidth
        scale = tl.rsqrt(tl.sum(one * one + two * two, 0) / width + eps)
        one, two = _numbers(factor, DTYPE)
        first, second = normalised(first, scale, one), normalised(second, scale, two)
    tl.store(out + word, _words(first, second), mask=is_word)
    tl.debug_barrier()  # all threads have read the numbers of the calls
    tl.store(calls + span, count + 1, mask=is_span, eviction_policy=KEPT_IN_L2)


@triton.jit
def push_all_gather_kernel(
    out, x, calls, parts, words,
    ROW: tl.constexpr, SPAN: tl.constexpr,
    RANK: tl.constexpr, RANKS: tl.constexpr, CAPACITY: tl.constexpr, STARTS_EARLY: tl.constexpr,
):  # fmt: skip
    """One program per SPAN words of ``x``, whose rows have ROW words."""
    if STARTS_EARLY:
        tl.extra.cuda.gdc_wait()
    span = tl.program_id(0)
    place = span * SPAN + tl.arange(0, SPAN)
    is_word = place < words
    call = tl.load(calls + span, eviction_policy=KEPT_IN_L2)
    own = tl.load(x + place, mask=is_word, other=0)
    _push(own, place, is_word, call, parts, RANK, RANKS, CAPACITY)
    begin = out + (place // ROW).to(tl.int64) * RANKS * ROW + place % ROW
    for rank in tl.static_range(RANKS):
        theirs = own
        if rank != RANK:
            theirs = _received(rank, place, is_word, call, parts, RANK, RANKS, CAPACITY)
        tl.store(begin + rank * ROW, theirs, mask=is_word)
    if STARTS_EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    tl.debug_barrier()  # all threads have read the number of the call
    tl.store(calls + span, call + 1, eviction_policy=KEPT_IN_L2)


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
        out=_in_words(out), x=_in_words(x), words=tokens * row, ROW=row, num_warps=8,
        **_constants(memory),
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
    tensors = {"out": out, "total": total, "residual": residual, "weight": weight}
    has_summands = x.dim() > out.dim()
    launch(
        push_all_reduce_kernel, (triton.cdiv(words, row),), memory,
        x=x if has_summands else _in_words(x), SUMMANDS=len(x) if has_summands else 0,
        eps=eps, words=words, ROW=row, BLOCK=block, SPANS=triton.cdiv(row, SPAN),
        DTYPE=tl.float32 if out.dtype == torch.float32 else tl.bfloat16,
        num_warps=min(32, max(1, block // 128)), **_constants(memory),
        **{name: None if tensor is None else _in_words(tensor) for name, tensor in tensors.items()},
    )  # fmt: skip


def _constants(memory: PushMemory) -> dict[str, Any]:
    return {
        "SPAN": SPAN,
        "RANK": memory.rank,
        "RANKS": len(memory.parts),
        "CAPACITY": memory.capacity,
    }


def _in_words(x: torch.Tensor) -> torch.Tensor:
    return x.view(-1).view(torch.int32)
