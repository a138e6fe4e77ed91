"""Tokens from rows of logits for CUDA. Contracts: ``graphkit.ops.logits``.

Programs share a row with many columns: each writes the result of its part, and a second kernel
joins the parts. With few rows, one program per row would use few multiprocessors.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from graphkit.ops.kernels.launch import launch, wait_for_kernel_before
from graphkit.ops.logits import empty_candidates

BITMASK_BLOCK = 4096
"""Tokens of a program."""
MAX_BLOCK = 8192
"""Values that a program holds at a time."""
LEAST_PART = 2048
"""Fewest columns of a program that has a part of a row."""
MOST_PROGRAMS = 264
"""Most programs of ``argmax_rows`` over parts of rows: two per multiprocessor of an H100."""
LEAST_SAVED = 3
"""Fewest reads in a row that parts must save, since a second kernel takes time."""
_NO_TOKEN = tl.constexpr(2**31 - 1)
"""Larger than any token."""


@triton.jit
def apply_token_bitmask_kernel(
    logits, bitmask, row_stride, column_stride, WORDS: tl.constexpr, VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per row and block of tokens; it reads no logits."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(bitmask + row * WORDS + token // 32, mask=token < VOCAB, other=-1)
    is_refused = ((word >> (token % 32)) & 1) == 0
    target = logits + row * row_stride + token.to(tl.int64) * column_stride
    tl.store(target, -float("inf"), mask=is_refused & (token < VOCAB))


def launch_apply_token_bitmask(args: Any) -> None:
    """Launch ``apply_token_bitmask``."""
    logits, (rows, vocab) = args.logits, args.logits.shape
    block = min(BITMASK_BLOCK, triton.next_power_of_2(vocab))
    launch(
        apply_token_bitmask_kernel, (rows, triton.cdiv(vocab, block)), args, logits=logits,
        row_stride=logits.stride(0), column_stride=logits.stride(1),
        WORDS=args.bitmask.shape[1], VOCAB=vocab, BLOCK=block,
    )  # fmt: skip


@triton.jit
def first_largest_of_lanes(values, tokens):
    """Return the smallest token of the largest value, and the value; NaN is larger than any."""
    nan = tl.min(tl.where(values != values, tokens, _NO_TOKEN), 0)
    value = tl.max(values, 0)
    token = tl.min(tl.where(values == value, tokens, _NO_TOKEN), 0)
    has_nan = nan < _NO_TOKEN
    return tl.where(has_nan, nan, token), tl.where(has_nan, float("nan"), value)


@triton.jit
def first_largest(
    row, begin, VOCAB: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, KEY: tl.constexpr
):  # fmt: skip
    """Return index and value of the first largest of COLUMNS numbers of a row from ``begin`` on.

    NaN is larger than any number. KEY is a dtype that holds every value. COLUMNS is a multiple of
    BLOCK, or reaches the end of the row. Each lane keeps its own first largest value.
    """
    lane = begin + tl.arange(0, BLOCK)
    largest = tl.full([BLOCK], -float("inf"), KEY)
    first = lane
    first_nan = tl.full([BLOCK], _NO_TOKEN, tl.int32)
    for offset in tl.range(0, COLUMNS, BLOCK, loop_unroll_factor=4):
        each = offset + lane
        value = tl.load(row + each, mask=each < VOCAB, other=-float("inf")).to(KEY)
        first_nan = tl.where(value != value, tl.minimum(first_nan, each), first_nan)
        is_larger = value > largest
        first = tl.where(is_larger, each, first)
        largest = tl.where(is_larger, value, largest)
    nan = tl.min(first_nan, 0)
    value = tl.max(largest, 0)
    index = tl.min(tl.where(largest == value, first, _NO_TOKEN), 0)
    has_nan = nan < _NO_TOKEN
    return tl.where(has_nan, nan, index), tl.where(has_nan, float("nan"), value)


@triton.jit
def _mapped(column, token_map):
    """Return the token of a column."""
    token = column.to(tl.int64)
    if token_map is not None:
        token = tl.load(token_map + token)
    return token


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["tokens"])
def argmax_rows_kernel(
    tokens, largest, logits, index, token_map, processed, is_processed, rows, row_stride,
    VOCAB: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, KEY: tl.constexpr,
    STARTS_EARLY: tl.constexpr,
):  # fmt: skip
    """One program per token and part of COLUMNS columns.

    ``largest`` is None if a row has one part. Else it receives the value of each part, and
    ``tokens`` its column, [N, parts].
    """
    wait_for_kernel_before(STARTS_EARLY)
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = token
    if index is not None:
        row = tl.minimum(tl.maximum(tl.load(index + token), 0), rows - 1)
    source, begin = logits + row * row_stride, part * COLUMNS
    if processed is None:
        best, value = first_largest(source, begin, VOCAB, COLUMNS, BLOCK, KEY)
    elif tl.load(is_processed + row) != 0:
        best, value = first_largest(processed + row * VOCAB, begin, VOCAB, COLUMNS, BLOCK, KEY)
    else:
        best, value = first_largest(source, begin, VOCAB, COLUMNS, BLOCK, KEY)
    if largest is None:
        tl.store(tokens + token, _mapped(best, token_map))
    else:
        to = token * tl.num_programs(1) + part
        tl.store(tokens + to, best)
        tl.store(largest + to, value)


@triton.jit
def join_argmax_kernel(
    tokens, columns, largest, token_map, PARTS: tl.constexpr, BLOCK: tl.constexpr,
    STARTS_EARLY: tl.constexpr,
):  # fmt: skip
    """One program per token, over the first largest value of each part of its row."""
    wait_for_kernel_before(STARTS_EARLY)
    token = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, BLOCK)
    entry = token * PARTS + part
    column = tl.load(columns + entry, mask=part < PARTS, other=_NO_TOKEN)
    value = tl.load(largest + entry, mask=part < PARTS, other=-float("inf"))
    best, _ = first_largest_of_lanes(value, column)
    tl.store(tokens + token, _mapped(best, token_map))


def argmax_part(rows: int, vocab_size: int) -> int:
    """Return the columns of a program of ``argmax_rows``: all of them, or a power of two."""
    columns = LEAST_PART
    while columns < vocab_size and rows * triton.cdiv(vocab_size, columns) > MOST_PROGRAMS:
        columns *= 2
    saved = triton.cdiv(vocab_size, MAX_BLOCK) - triton.cdiv(columns, MAX_BLOCK)
    return columns if saved >= LEAST_SAVED else vocab_size


def launch_argmax_rows(args: Any) -> None:
    """Launch ``argmax_rows``."""
    logits = args.logits if args.logits.stride(1) == 1 else args.logits.contiguous()
    rows, vocab_size = len(args.tokens), logits.shape[1]
    columns = argmax_part(rows, vocab_size)
    parts = triton.cdiv(vocab_size, columns)
    is_double = logits.dtype is torch.float64
    tokens, largest = args.tokens, None
    if parts > 1:
        tokens = logits.new_empty(rows, parts, dtype=torch.int32)
        largest = logits.new_empty(rows, parts, dtype=torch.float64 if is_double else torch.float32)
    launch(
        argmax_rows_kernel, (rows, parts), args, tokens=tokens, largest=largest, logits=logits,
        rows=len(logits), row_stride=logits.stride(0), VOCAB=vocab_size, COLUMNS=columns,
        KEY=tl.float64 if is_double else tl.float32, **_block(columns),
    )  # fmt: skip
    if parts > 1:
        launch(
            join_argmax_kernel, (rows,), args, columns=tokens, largest=largest, PARTS=parts,
            BLOCK=triton.next_power_of_2(parts), num_warps=1,
        )  # fmt: skip


def _block(columns: int) -> dict[str, int]:
    """Return the block in which a program reads so many columns, and its warps."""
    block = min(MAX_BLOCK, triton.next_power_of_2(columns))
    return {"BLOCK": block, "num_warps": max(4, block // 512)}


@triton.jit
def _next_largest(score, column, is_left):
    """Return the largest score that is left, its first column, and what is left without it."""
    best = tl.max(tl.where(is_left, score, -float("inf")), 0)
    chosen = tl.min(tl.where(is_left & (score == best), column, _NO_TOKEN), 0)
    return best, chosen, is_left & (column != chosen)


@triton.jit(do_not_specialize=["rows", "topk"])
def top_candidates_kernel(
    probs, tokens, sums, logits, index, temperature, token_map, rows, row_stride, topk,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr, STARTS_EARLY: tl.constexpr,
):  # fmt: skip
    """One program per row and part of BLOCK columns.

    ``sums`` is None if a row has one part. Else it receives the sum of the weights of each part,
    relative to its largest score, ``probs`` the K largest scores, [N, parts, K], and ``tokens``
    their columns. A part of fewer columns ends with ``_NO_TOKEN`` and -inf.
    """
    wait_for_kernel_before(STARTS_EARLY)
    to, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = to
    if index is not None:
        row = tl.minimum(tl.maximum(tl.load(index + to), 0), rows - 1)
    divisor = 1.0
    if temperature is not None:
        divisor = tl.load(temperature + to)
    column = part * BLOCK + tl.arange(0, BLOCK)
    is_left = column < VOCAB
    value = tl.load(logits + row * row_stride + column, mask=is_left, other=-float("inf"))
    value = tl.div_rn(value.to(tl.float32), divisor)
    score = tl.where(value == value, value, -float("inf"))  # a sum that is NaN shows NaN
    top = tl.max(score, 0)
    # A part may have no finite score, of which the weights are NaN.
    total = tl.sum(tl.where(value == -float("inf"), 0, tl.exp(value - top)), 0)
    to = to * tl.num_programs(1) + part
    if sums is not None:
        tl.store(sums + to, total)
    for each in range(topk):
        best, chosen, is_left = _next_largest(score, column, is_left)
        if sums is None:
            tl.store(probs + to * topk + each, tl.exp(best - top) / total)
            tl.store(tokens + to * topk + each, _mapped(chosen, token_map))
        else:
            tl.store(probs + to * topk + each, best)
            tl.store(tokens + to * topk + each, chosen)


@triton.jit(do_not_specialize=["topk"])
def join_candidates_kernel(
    probs, tokens, scores, columns, sums, token_map, topk, PARTS: tl.constexpr, BLOCK: tl.constexpr,
    STARTS_EARLY: tl.constexpr,
):  # fmt: skip
    """One program per row. A lane holds the largest score of its part that is not yet chosen."""
    wait_for_kernel_before(STARTS_EARLY)
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    part = row * PARTS + lane
    is_part = lane < PARTS
    score = tl.load(scores + part * topk, mask=is_part, other=-float("inf"))
    column = tl.load(columns + part * topk, mask=is_part, other=_NO_TOKEN)
    sum_of_part = tl.load(sums + part, mask=is_part, other=0.0)
    top = tl.max(score, 0)
    # The sum of a part without finite scores is 0 or NaN.
    scale = tl.where(score == -float("inf"), 1.0, tl.exp(score - top))
    total = tl.sum(sum_of_part * scale, 0)
    number = tl.zeros([BLOCK], tl.int32)
    for each in range(topk):
        best, chosen, is_other = _next_largest(score, column, is_part)
        tl.store(probs + row * topk + each, tl.exp(best - top) / total)
        tl.store(tokens + row * topk + each, _mapped(chosen, token_map))
        is_chosen = is_part & (is_other == 0)
        number += is_chosen.to(tl.int32)
        entry, is_entry = part * topk + number, is_chosen & (number < topk)
        following = tl.load(scores + entry, mask=is_entry, other=-float("inf"))
        following_column = tl.load(columns + entry, mask=is_entry, other=_NO_TOKEN)
        score = tl.where(is_chosen, following, score)
        column = tl.where(is_chosen, following_column, column)


def launch_top_candidates(args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch ``top_candidates``. The parts of a row depend on its columns alone, as do its sums."""
    probs, tokens = candidates = empty_candidates(args)
    logits = args.logits if args.logits.stride(1) == 1 else args.logits.contiguous()
    (rows, topk), vocab_size = probs.shape, logits.shape[1]
    columns = vocab_size if vocab_size <= MAX_BLOCK else LEAST_PART
    parts = triton.cdiv(vocab_size, columns)
    sums = None
    if parts > 1:
        probs = logits.new_empty(rows, parts, topk, dtype=torch.float32)
        tokens = logits.new_empty(rows, parts, topk, dtype=torch.int32)
        sums = logits.new_empty(rows, parts, dtype=torch.float32)
    launch(
        top_candidates_kernel, (rows, parts), args, probs=probs, tokens=tokens, sums=sums,
        logits=logits, rows=len(logits), row_stride=logits.stride(0), VOCAB=vocab_size,
        **_block(columns),
    )  # fmt: skip
    if parts > 1:
        launch(
            join_candidates_kernel, (rows,), args, probs=candidates[0], tokens=candidates[1],
            scores=probs, columns=tokens, sums=sums, PARTS=parts,
            BLOCK=triton.next_power_of_2(parts), num_warps=1,
        )  # fmt: skip
    return candidates
