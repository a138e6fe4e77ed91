"""The distribution of a request's tokens for CUDA. Contract: ``graphkit.ops.target_probs``.

Several programs share a row, in three launches:

1. Scan: the largest logit and the sum of each chunk. With filters, also the number and the sum of
   its logits above a few bounds that are sampled from the row.
2. Select: the two sampled bounds around the bound of the filters. The weights between them are the
   candidates; those above all pass.
3. Write: the bound of the filters, found among the candidates, and the probabilities.

The order of all sums depends on V alone: no other row changes a result.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from graphkit.ops.kernels.launch import launch, wait_for_kernel_before
from graphkit.ops.kernels.logits import first_largest_of_lanes

CHUNK = 4096
"""Logits of a program that scans or selects."""
TILE = 256
"""Numbers that a program compares with several bounds at a time, one per thread."""
BLOCK = 2048
"""Weights that a program reads or writes at a time."""
WRITERS = 264
"""Programs that select or write, two per SM of an H100. Each repeats the work of its row."""
_BOUNDS, _SAMPLES, _RUN = 16, 128, 8
"""Sampled bounds, the logits that are read for each, and how many of these are neighbours."""
_LOWEST = tl.constexpr(-3.4028234663852886e38)
"""The least finite float32."""


@triton.jit
def _settings(request, temperatures, top_ks, top_ps, min_ps):
    """Return temperature, divisor of the logits, the filters, and whether any has an effect."""
    temperature = tl.load(temperatures + request)
    top_k = tl.load(top_ks + request)
    top_p = tl.load(top_ps + request)
    min_p = tl.load(min_ps + request)
    has_filter = ((top_k > 0) | (top_p < 1) | (min_p > 0)) & (temperature > 0)
    divisor = tl.where(temperature == 0, 1.0, temperature)
    return temperature, divisor, top_k, top_p, min_p, has_filter


@triton.jit
def _is_replaced(row, processed, is_processed):
    """Return whether a processed row replaces the row of logits."""
    is_replaced = False
    if processed is not None:
        is_replaced = tl.load(is_processed + row) != 0
    return is_replaced


@triton.jit
def _load(
    logits, processed, row, row_stride, is_replaced, each, mask, other,
    VOCAB: tl.constexpr, KEY: tl.constexpr,
):  # fmt: skip
    """Return some logits of a row, from ``processed`` if that replaces it."""
    if processed is None:
        logit = tl.load(logits + row * row_stride + each, mask=mask, other=other).to(KEY)
    elif is_replaced:
        logit = tl.load(processed + row * VOCAB + each, mask=mask, other=other).to(KEY)
    else:
        logit = tl.load(logits + row * row_stride + each, mask=mask, other=other).to(KEY)
    return logit


@triton.jit
def _weight(logit, largest, divisor):
    """Return probabilities divided by the probability of the logit ``largest``."""
    return tl.exp(tl.div_rn(logit.to(tl.float32) - largest, divisor))


@triton.jit
def _sampled_bounds(
    logits, processed, row, row_stride, is_replaced,
    VOCAB: tl.constexpr, BOUNDS: tl.constexpr, SAMPLES: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """Return logits that divide a row, in no order, more of them among the large ones.

    Bound i is the largest of 2**(i % 8) logits. The last one is below all finite logits.
    """
    index = tl.arange(0, BOUNDS)[:, None]
    sample = tl.arange(0, SAMPLES)[None, :]
    run = (index * SAMPLES + sample) // RUN
    each = tl.minimum(run * VOCAB // (BOUNDS * SAMPLES // RUN) + sample % RUN, VOCAB - 1)
    is_used = sample < (1 << (index % 8))
    logit = _load(logits, processed, row, row_stride, is_replaced, each, is_used, -float("inf"),
                  VOCAB, tl.float32)  # fmt: skip
    bound = tl.maximum(tl.max(logit, 1), _LOWEST)
    return tl.where(tl.arange(0, BOUNDS) == BOUNDS - 1, _LOWEST, bound)


@triton.jit(do_not_specialize=["width"])
def scan_logits_kernel(
    tokens, largest, bounds, counts, sums, logits, req_pool_indices, temperatures, top_ks, top_ps,
    min_ps, processed, is_processed, width, row_stride,
    VOCAB: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr,
    BOUNDS: tl.constexpr, SAMPLES: tl.constexpr, RUN: tl.constexpr, KEY: tl.constexpr,
    STARTS_EARLY: tl.constexpr,
):  # fmt: skip
    """One program per row and chunk. Sums are relative to the largest logit of the chunk.

    Without filters, the last of ``sums`` alone is written.
    """
    wait_for_kernel_before(STARTS_EARLY)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    part = row * tl.num_programs(1) + chunk
    request = tl.load(req_pool_indices + row // width)
    _, divisor, _, _, _, has_filter = _settings(request, temperatures, top_ks, top_ps, min_ps)
    is_replaced = _is_replaced(row, processed, is_processed)
    each = chunk * CHUNK + tl.arange(0, CHUNK)
    logit = _load(logits, processed, row, row_stride, is_replaced, each, each < VOCAB,
                  -float("inf"), VOCAB, KEY)  # fmt: skip
    token, best = first_largest_of_lanes(logit, each)
    tl.store(tokens + part, token)
    tl.store(largest + part, best)
    best = best.to(tl.float32)
    if has_filter:
        index = tl.arange(0, BOUNDS)
        bound = _sampled_bounds(logits, processed, row, row_stride, is_replaced,
                                VOCAB, BOUNDS, SAMPLES, RUN)  # fmt: skip
        if chunk == 0:
            tl.store(bounds + row * BOUNDS + index, bound)
        count = tl.zeros([BOUNDS, TILE], tl.int32)
        total = tl.zeros([BOUNDS, TILE], tl.float32)
        for begin in tl.range(0, CHUNK, TILE, loop_unroll_factor=4):
            one = chunk * CHUNK + begin + tl.arange(0, TILE)
            value = _load(logits, processed, row, row_stride, is_replaced, one, one < VOCAB,
                          -float("inf"), VOCAB, tl.float32)  # fmt: skip
            is_above = value[None, :] >= bound[:, None]
            count += is_above.to(tl.int32)
            total += tl.where(is_above, _weight(value, best, divisor)[None, :], 0)
        tl.store(counts + part * BOUNDS + index, tl.sum(count, 1))
        tl.store(sums + part * BOUNDS + index, tl.sum(total, 1))
    else:
        # A chunk may have no finite logit, of which the weights are NaN.
        weight = tl.where(logit > -float("inf"), _weight(logit, best, divisor), 0)
        tl.store(sums + part * BOUNDS + BOUNDS - 1, tl.sum(weight, 0))


@triton.jit
def _scales(largest, part, chunks, top, divisor, CHUNKS: tl.constexpr):
    """Return what makes sums of each chunk relative to the largest logit of the row."""
    lane = tl.arange(0, CHUNKS)
    best = tl.load(largest + part + lane, mask=lane < chunks, other=-float("inf"))
    return _weight(best, top, divisor)


@triton.jit
def _largest_of_row(tokens, largest, part, chunks, CHUNKS: tl.constexpr):
    """Return token and value of the largest logit of a row."""
    lane = tl.arange(0, CHUNKS)
    token = tl.load(tokens + part + lane, mask=lane < chunks, other=0)
    best = tl.load(largest + part + lane, mask=lane < chunks, other=-float("inf"))
    token, top = first_largest_of_lanes(best, token)
    return token, top.to(tl.float32)


@triton.jit(do_not_specialize=["width"])
def select_weights_kernel(
    candidates, facts, tokens, largest, bounds, counts, sums, logits, req_pool_indices,
    temperatures, top_ks, top_ps, min_ps, processed, is_processed, width, row_stride, chunks,
    VOCAB: tl.constexpr, CHUNK: tl.constexpr, BOUNDS: tl.constexpr, CHUNKS: tl.constexpr,
    STARTS_EARLY: tl.constexpr,
):  # fmt: skip
    """Several programs per row, each of every so many chunks; no work for rows without filters.

    The facts of a row are the number of its candidates, number and sum of the weights above them,
    and the sum of all.
    """
    wait_for_kernel_before(STARTS_EARLY)
    row = tl.program_id(0).to(tl.int64)
    first_chunk = tl.program_id(1)
    part = row * chunks
    request = tl.load(req_pool_indices + row // width)
    _, divisor, top_k, top_p, min_p, has_filter = _settings(
        request, temperatures, top_ks, top_ps, min_ps
    )
    is_replaced = _is_replaced(row, processed, is_processed)
    if has_filter:
        _token, top = _largest_of_row(tokens, largest, part, chunks, CHUNKS)
        scale = _scales(largest, part, chunks, top, divisor, CHUNKS)
        index = tl.arange(0, BOUNDS)
        lane = tl.arange(0, CHUNKS)
        entry = (part + lane[:, None]) * BOUNDS + index[None, :]
        bound = tl.load(bounds + row * BOUNDS + index)
        counts_above = tl.load(counts + entry, mask=lane[:, None] < chunks, other=0)
        sums_above = tl.load(sums + entry, mask=lane[:, None] < chunks, other=0)
        count = tl.sum(counts_above, 0)
        total = tl.sum(sums_above * scale[:, None], 0)
        weight = _weight(bound, top, divisor)

        # Each filter passes all logits from ``upper`` on, and none below ``lower``.
        infinity = float("inf")
        has_top_k = (top_k > 0) & (tl.max(count, 0) >= top_k)
        is_above = count < top_k
        upper = tl.where(has_top_k, tl.min(tl.where(is_above, bound, infinity), 0), _LOWEST)
        lower = tl.where(has_top_k, tl.max(tl.where(is_above, _LOWEST, bound), 0), infinity)
        # Top_k leaves at least the sum above its candidates to top_p.
        left = tl.where(has_top_k, tl.max(tl.where(is_above, total, 0), 0), tl.max(total, 0))
        if top_p < 1:
            is_above = total < top_p * left
            upper = tl.maximum(upper, tl.min(tl.where(is_above, bound, infinity), 0))
            if has_top_k == 0:
                lower = tl.max(tl.where(is_above, _LOWEST, bound), 0)
        if min_p > 0:
            is_above = weight >= min_p
            upper = tl.maximum(upper, tl.min(tl.where(is_above, bound, infinity), 0))
            if (has_top_k == 0) & (top_p >= 1):
                lower = tl.max(tl.where(is_above, _LOWEST, bound), 0)
        # Rounding gives equal weights to different logits: take all that equal the least one.
        least = _weight(lower, top, divisor)
        below = tl.max(tl.where(weight < least, bound, _LOWEST), 0)
        lower = tl.where(lower < infinity, below, lower)

        before = tl.max(tl.where((bound >= upper)[None, :], counts_above, 0), 1)
        until = tl.max(tl.where((bound >= lower)[None, :], counts_above, 0), 1)
        selected = tl.maximum(until - before, 0)
        if first_chunk == 0:
            fact = facts + row * 4
            tl.store(fact, tl.sum(selected, 0).to(tl.float32))
            tl.store(fact + 1, tl.sum(before, 0).to(tl.float32))
            tl.store(fact + 2, tl.max(tl.where(bound >= upper, total, 0), 0))
            tl.store(fact + 3, tl.max(total, 0))
        for chunk in tl.range(first_chunk, chunks, tl.num_programs(1)):
            if tl.sum(tl.where(lane == chunk, selected, 0), 0) > 0:
                each = chunk * CHUNK + tl.arange(0, CHUNK)
                logit = _load(logits, processed, row, row_stride, is_replaced, each, each < VOCAB,
                              -float("inf"), VOCAB, tl.float32)  # fmt: skip
                is_candidate = (logit >= lower) & (logit < upper)
                first = row * VOCAB + tl.sum(tl.where(lane < chunk, selected, 0), 0)
                place = first + tl.cumsum(is_candidate.to(tl.int32), 0) - 1
                tl.store(candidates + place, _weight(logit, top, divisor), mask=is_candidate)


@triton.jit
def _sum_from(weights, count, bound, BLOCK: tl.constexpr):
    """Return the sum of the weights that are at least ``bound``."""
    lane = tl.arange(0, BLOCK)
    sums = tl.zeros([BLOCK], tl.float32)
    for begin in tl.range(0, count, BLOCK):
        weight = tl.load(weights + begin + lane, mask=begin + lane < count, other=-1)
        sums += tl.where(weight >= bound, weight, 0)
    return tl.sum(sums, 0)


@triton.jit
def _weights_between(weights, count, low, high, BLOCK: tl.constexpr):
    """Return the bits of the least weight from ``low`` on and of the largest one below ``high``."""
    lane = tl.arange(0, BLOCK)
    least = tl.full([BLOCK], 1, tl.float32)
    most = tl.zeros([BLOCK], tl.float32)
    for begin in tl.range(0, count, BLOCK):
        is_weight = begin + lane < count
        weight = tl.load(weights + begin + lane, mask=is_weight, other=0)
        least = tl.minimum(least, tl.where(is_weight & (weight >= low), weight, 1))
        most = tl.maximum(most, tl.where(is_weight & (weight < high), weight, 0))
    return tl.min(least, 0).to(tl.int32, bitcast=True), tl.max(most, 0).to(tl.int32, bitcast=True)


@triton.jit
def _largest_bound(
    weights, count, above, goal, is_count,
    BOUNDS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the largest weight that reaches ``goal`` together with ``above``.

    The weights from it on reach the goal, by their number or by their sum. If none does because
    sums are rounded, return the least weight. Numbers of 0 to 1 have the order of their bits. Each
    turn tries several bounds, and continues between the two weights that are left.
    """
    lane = tl.arange(0, TILE)
    index = tl.arange(0, BOUNDS)
    least, most = _weights_between(weights, count, 0.0, 2.0, BLOCK)
    while most > least:
        step = (most - least) // (BOUNDS + 1) + 1
        bound = tl.minimum(least + (index + 1) * step, most + 1).to(tl.float32, bitcast=True)
        sums = tl.zeros([BOUNDS, TILE], tl.float32)
        for begin in tl.range(0, count, TILE, loop_unroll_factor=4):
            weight = tl.load(weights + begin + lane, mask=begin + lane < count, other=-1)
            amount = tl.where(is_count, 1.0, weight)
            sums += tl.where(weight[None, :] >= bound[:, None], amount[None, :], 0)
        # Rounding keeps the order: more weights never have a smaller sum.
        reach = tl.sum((above + tl.sum(sums, 1) >= goal).to(tl.int32), 0)
        low = tl.minimum(least + reach * step, most)  # all bounds reach a goal of 0
        high = tl.minimum(low + step, most + 1)
        least, most = _weights_between(
            weights, count, low.to(tl.float32, bitcast=True), high.to(tl.float32, bitcast=True),
            BLOCK,
        )  # fmt: skip
    return least.to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["width"])
def write_probs_kernel(
    probs, candidates, facts, tokens, largest, sums, logits, req_pool_indices, temperatures,
    top_ks, top_ps, min_ps, processed, is_processed, width, row_stride, chunks,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr,
    TILE: tl.constexpr, BOUNDS: tl.constexpr, CHUNKS: tl.constexpr, STARTS_EARLY: tl.constexpr,
):  # fmt: skip
    """Several programs per row, each of which writes every so many blocks."""
    wait_for_kernel_before(STARTS_EARLY)
    row = tl.program_id(0).to(tl.int64)
    part = row * chunks
    request = tl.load(req_pool_indices + row // width)
    temperature, divisor, top_k, top_p, min_p, has_filter = _settings(
        request, temperatures, top_ks, top_ps, min_ps
    )
    token, top = _largest_of_row(tokens, largest, part, chunks, CHUNKS)
    bound = 0.0
    if has_filter & (top - top == 0):  # finite
        weights = candidates + row * VOCAB
        count = tl.load(facts + row * 4).to(tl.int32)
        number_above = tl.load(facts + row * 4 + 1)
        sum_above = tl.load(facts + row * 4 + 2)
        left = tl.load(facts + row * 4 + 3)
        goal = top_k.to(tl.float32)
        if (top_k > 0) & (number_above + count >= goal):
            bound = _largest_bound(weights, count, number_above, goal, True, BOUNDS, TILE, BLOCK)
            left = sum_above + _sum_from(weights, count, bound, BLOCK)
        if top_p < 1:
            goal = top_p * left
            nucleus = _largest_bound(weights, count, sum_above, goal, False, BOUNDS, TILE, BLOCK)
            bound = tl.maximum(bound, nucleus)
        bound = tl.maximum(bound, min_p)
        total = sum_above + _sum_from(weights, count, bound, BLOCK)
    else:
        scale = _scales(largest, part, chunks, top, divisor, CHUNKS)
        lane = tl.arange(0, CHUNKS)
        last = (part + lane) * BOUNDS + BOUNDS - 1
        total = tl.sum(tl.load(sums + last, mask=lane < chunks, other=0) * scale, 0)
    is_replaced = _is_replaced(row, processed, is_processed)
    first = tl.program_id(1) * BLOCK
    for begin in tl.range(first, VOCAB, tl.num_programs(1) * BLOCK):
        each = begin + tl.arange(0, BLOCK)
        logit = _load(logits, processed, row, row_stride, is_replaced, each, each < VOCAB, 0.0,
                      VOCAB, tl.float32)  # fmt: skip
        weight = _weight(logit, top, divisor)
        prob = tl.where(weight < bound, 0, weight) / total  # NaN stays
        prob = tl.where(temperature == 0, (each == token).to(tl.float32), prob)
        tl.store(probs + row * VOCAB + each, prob, mask=each < VOCAB)


def launch_target_probs(args: Any, probs: torch.Tensor) -> None:
    """Launch ``target_probs``."""
    logits = args.logits if args.logits.stride(1) == 1 else args.logits.contiguous()
    rows, vocab_size = logits.shape
    chunks = triton.cdiv(vocab_size, CHUNK)
    is_double = logits.dtype is torch.float64

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(rows, *shape, dtype=dtype, device=logits.device)

    row = {
        "tokens": empty(chunks, dtype=torch.int32),
        "largest": empty(chunks, dtype=torch.float64 if is_double else torch.float32),
        "sums": empty(chunks, _BOUNDS),
        "logits": logits, "row_stride": logits.stride(0), "VOCAB": vocab_size, "BOUNDS": _BOUNDS,
        "num_warps": 8,
    }  # fmt: skip
    table = {"bounds": empty(_BOUNDS), "counts": empty(chunks, _BOUNDS, dtype=torch.int32)}
    selected = {
        "candidates": empty(vocab_size), "facts": empty(4), "CHUNKS": triton.next_power_of_2(chunks)
    }  # fmt: skip
    programs = triton.cdiv(WRITERS, max(rows, 1))
    launch(
        scan_logits_kernel, (rows, chunks), args, CHUNK=CHUNK, TILE=TILE, SAMPLES=_SAMPLES,
        RUN=_RUN, KEY=tl.float64 if is_double else tl.float32, **table, **row,
    )  # fmt: skip
    launch(
        select_weights_kernel, (rows, min(chunks, programs)), args, CHUNK=CHUNK, chunks=chunks,
        **table, **selected, **row,
    )  # fmt: skip
    launch(
        write_probs_kernel, (rows, min(triton.cdiv(vocab_size, BLOCK), programs)), args,
        probs=probs, chunks=chunks, BLOCK=BLOCK, TILE=TILE, **selected, **row,
    )  # fmt: skip
