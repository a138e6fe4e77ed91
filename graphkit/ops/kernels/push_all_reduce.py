"""All-reduce of small tensors over GPUs that write to the memory of each other.

Each rank writes its words into a part of every other rank's memory, each word together with the
number of the call. A rank that reads the number of this call has the word too, because both arrive
in one store of 8 bytes (the protocol LL of NCCL). It doubles the bytes and needs no barrier, which
takes most of the time of a small all-reduce.

Calls use two parts per pair of ranks in turn. A rank writes the words of call n + 2 where those of
call n were. It then has the words of call n + 1 of all others, who had read those of call n before
they wrote them.
"""

import torch
import triton
import triton.language as tl

WORD = 4
"""Bytes of a word."""
BLOCK = 1024
"""Words of a program. A word always belongs to the same program, which counts its calls."""


@triton.jit
def push_all_reduce_kernel(
    out, x, calls, parts, words,
    RANK: tl.constexpr, RANKS: tl.constexpr, CAPACITY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per BLOCK words, each a float32 number or two bfloat16 numbers."""
    block = tl.program_id(0)
    call = tl.load(calls + block)
    stamp = (call.to(tl.int64) + 1) << 32
    place = block * BLOCK + tl.arange(0, BLOCK)
    is_word = place < words
    own = tl.load(x + place, mask=is_word, other=0)
    turn = (call & 1) * RANKS
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            theirs = tl.load(parts + peer).to(tl.pointer_type(tl.int64))
            sent = stamp | (own.to(tl.int64) & 0xFFFFFFFF)
            tl.store(theirs + (turn + RANK) * CAPACITY + place, sent, mask=is_word)
    mine = tl.load(parts + RANK).to(tl.pointer_type(tl.int64))
    first = tl.zeros([BLOCK], tl.float32)
    second = tl.zeros([BLOCK], tl.float32)
    for rank in tl.static_range(RANKS):  # in this order everywhere: the sums have the same bits
        word = own
        if rank != RANK:
            source = mine + (turn + rank) * CAPACITY + place
            got = tl.load(source, mask=is_word, other=stamp, volatile=True)
            while tl.max(((got >> 32) != (stamp >> 32)).to(tl.int32), 0) != 0:
                got = tl.load(source, mask=is_word, other=stamp, volatile=True)
            word = got.to(tl.int32)
        if out.dtype.element_ty == tl.float32:
            first += word.to(tl.float32, bitcast=True)
        else:
            first += (word << 16).to(tl.float32, bitcast=True)
            second += (word & -65536).to(tl.float32, bitcast=True)
    if out.dtype.element_ty == tl.float32:
        tl.store(out + place, first, mask=is_word)
    else:
        column = block * 2 * BLOCK + tl.arange(0, 2 * BLOCK)
        pairs = tl.interleave(first, second).to(out.dtype.element_ty)
        tl.store(out + column, pairs, mask=column < 2 * words)
    tl.debug_barrier()  # all threads have read the number of the call
    tl.store(calls + block, call + 1)


def launch_push_all_reduce(
    x: torch.Tensor, calls: torch.Tensor, parts: torch.Tensor, rank: int, capacity: int
) -> torch.Tensor:
    """Return the sum over ranks, with the same bits on each.

    Args:
        x: Contiguous float32 or bfloat16, of at most ``capacity`` words of 4 bytes.
        calls: Calls so far by block of words, int32 [capacity / BLOCK]; written.
        parts: Address of the memory of each rank, int64 [R]. It has 2 x R parts of ``capacity``
            words of 8 bytes, 0 before the first call.
        rank: This rank.
        capacity: Words of a part.
    """
    out, words = torch.empty_like(x), x.numel() * x.itemsize // WORD
    if words:
        push_all_reduce_kernel[(triton.cdiv(words, BLOCK),)](
            out, x.view(-1).view(torch.int32), calls, parts, words,
            rank, len(parts), capacity, BLOCK, num_warps=8,
        )  # fmt: skip
    return out
