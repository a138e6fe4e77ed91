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

from graphkit.ops.kernels.argmax import first_of
from graphkit.ops.kernels.launch import launch

CHUNK = 4096
"""Logits of a program that scans or selects."""
TILE = 64
"""Logits that a program compares with the sampled bounds at a time."""
BLOCK = 2048
"""Weights that a program searches or writes at a time."""
WRITERS = 264
"""Programs that write, two per SM of an H100. With filters, each of them searches the bound."""
_BOUNDS, _SAMPLES = 16, 32
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
def _weight(logit, largest, divisor):
    """Return probabilities divided by that of the logit ``largest``."""
    return tl.exp(tl.div_rn(logit.to(tl.float32) - largest, divisor))


@triton.jit
def _sampled_bounds(source, VOCAB: tl.constexpr, BOUNDS: tl.constexpr, SAMPLES: tl.constexpr):
    """Return logits that divide a row, in no order, more of them among the large ones.

    Bound i is the largest of 2**(i % 6) logits. The last one is below all finite logits.
    """
    index = tl.arange(0, BOUNDS)
    sample = tl.arange(0, SAMPLES)
    each = (index[:, None] * SAMPLES + sample[None, :]) * VOCAB // (BOUNDS * SAMPLES)
    is_used = sample[None, :] < (1 << (index % 6))[:, None]
    logit = tl.load(source + each, mask=is_used, other=-float("inf")).to(tl.float32)
    bound = tl.maximum(tl.max(logit, 1), _LOWEST)
    return tl.where(index == BOUNDS - 1, _LOWEST, bound)


@triton.jit
def scan_logits_kernel(
    tokens, largest, bounds, counts, sums, logits, req_pool_indices, temperatures, top_ks, top_ps,
    min_ps, width, row_stride, VOCAB: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr,
    BOUNDS: tl.constexpr, SAMPLES: tl.constexpr, KEY: tl.constexpr,
):  # fmt: skip
    """One program per row and chunk. Sums are relative to the largest logit of the chunk.

    Without filters, the last of ``sums`` alone is written.
    """
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    part = row * tl.num_programs(1) + chunk
    request = tl.load(req_pool_indices + row // width)
    _, divisor, _, _, _, has_filter = _settings(request, temperatures, top_ks, top_ps, min_ps)
    source = logits + row * row_stride
    each = chunk * CHUNK + tl.arange(0, CHUNK)
    logit = tl.load(source + each, mask=each < VOCAB, other=-float("inf")).to(KEY)
    token, best = first_of(logit, each)
    tl.store(tokens + part, token)
    tl.store(largest + part, best)
    best = best.to(tl.float32)
    if has_filter:
        index = tl.arange(0, BOUNDS)
        bound = _sampled_bounds(source, VOCAB, BOUNDS, SAMPLES)
        if chunk == 0:
            tl.store(bounds + row * BOUNDS + index, bound)
        count = tl.zeros([TILE, BOUNDS], tl.int32)
        total = tl.zeros([TILE, BOUNDS], tl.float32)
        for begin in tl.range(0, CHUNK, TILE, loop_unroll_factor=4):
            one = (chunk * CHUNK + begin + tl.arange(0, TILE))[:, None]
            value = tl.load(source + one, mask=one < VOCAB, other=-float("inf")).to(tl.float32)
            is_above = value >= bound[None, :]
            count += is_above.to(tl.int32)
            total += tl.where(is_above, _weight(value, best, divisor), 0)
        tl.store(counts + part * BOUNDS + index, tl.sum(count, 0))
        tl.store(sums + part * BOUNDS + index, tl.sum(total, 0))
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
    token, top = first_of(best, token)
    return token, top.to(tl.float32)


@triton.jit
def select_weights_kernel(
    candidates, facts, tokens, largest, bounds, counts, sums, logits, req_pool_indices,
    temperatures, top_ks, top_ps, min_ps, width, row_stride,
    VOCAB: tl.constexpr, CHUNK: tl.constexpr, BOUNDS: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """One program per row and chunk, without work unless the row has filters.

    The facts of a row are the number of its candidates, number and sum of the weights above them,
    and the sum of all.
    """
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    chunks = tl.num_programs(1)
    part = row * chunks
    request = tl.load(req_pool_indices + row // width)
    _, divisor, top_k, top_p, min_p, has_filter = _settings(
        request, temperatures, top_ks, top_ps, min_ps
    )
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
        if chunk == 0:
            fact = facts + row * 4
            tl.store(fact, tl.sum(selected, 0).to(tl.float32))
            tl.store(fact + 1, tl.sum(before, 0).to(tl.float32))
            tl.store(fact + 2, tl.max(tl.where(bound >= upper, total, 0), 0))
            tl.store(fact + 3, tl.max(total, 0))
        if tl.sum(tl.where(lane == chunk, selected, 0), 0) > 0:
            each = chunk * CHUNK + tl.arange(0, CHUNK)
            source = logits + row * row_stride
            logit = tl.load(source + each, mask=each < VOCAB, other=-infinity).to(tl.float32)
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
def _largest_bound(weights, count, above, goal, is_count, BLOCK: tl.constexpr):
    """Return the largest bound that reaches ``goal``, by number or by sum, together with ``above``.

    If none does because sums are rounded, return the least weight. Numbers of 0 to 1 have the order
    of their bits, which are searched exactly. Each reading of the weights tries three bounds.
    """
    lane = tl.arange(0, BLOCK)
    least = tl.full([BLOCK], 1, tl.float32)
    most = tl.zeros([BLOCK], tl.float32)
    for begin in tl.range(0, count, BLOCK):
        is_weight = begin + lane < count
        weight = tl.load(weights + begin + lane, mask=is_weight, other=0)
        least = tl.minimum(least, tl.where(is_weight, weight, 1))
        most = tl.maximum(most, weight)
    low = tl.min(least, 0).to(tl.int32, bitcast=True)  # reaches the goal
    high = tl.max(most, 0).to(tl.int32, bitcast=True) + 1  # does not
    while high - low > 1:
        step = (high - low + 3) // 4
        bound1 = (low + step).to(tl.float32, bitcast=True)
        bound2 = (low + 2 * step).to(tl.float32, bitcast=True)
        bound3 = (low + 3 * step).to(tl.float32, bitcast=True)
        sums1 = tl.zeros([BLOCK], tl.float32)
        sums2 = tl.zeros([BLOCK], tl.float32)
        sums3 = tl.zeros([BLOCK], tl.float32)
        for begin in tl.range(0, count, BLOCK):
            weight = tl.load(weights + begin + lane, mask=begin + lane < count, other=-1)
            amount = tl.where(is_count, 1.0, weight)
            sums1 += tl.where(weight >= bound1, amount, 0)
            sums2 += tl.where(weight >= bound2, amount, 0)
            sums3 += tl.where(weight >= bound3, amount, 0)
        # Rounding keeps the order: more weights never have a smaller sum.
        reach1 = (above + tl.sum(sums1, 0) >= goal).to(tl.int32)
        reach2 = (above + tl.sum(sums2, 0) >= goal).to(tl.int32)
        reach3 = (above + tl.sum(sums3, 0) >= goal).to(tl.int32)
        low = tl.minimum(low + (reach1 + reach2 + reach3) * step, high - 1)  # any reach a goal of 0
        high = tl.minimum(high, low + step)
    return low.to(tl.float32, bitcast=True)


@triton.jit
def write_probs_kernel(
    probs, candidates, facts, tokens, largest, sums, logits, req_pool_indices, temperatures,
    top_ks, top_ps, min_ps, width, row_stride, chunks,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr, BOUNDS: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Several programs per row, each of which writes every so many blocks."""
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
            bound = _largest_bound(weights, count, number_above, goal, True, BLOCK)
            left = sum_above + _sum_from(weights, count, bound, BLOCK)
        if top_p < 1:
            found = _largest_bound(weights, count, sum_above, top_p * left, False, BLOCK)
            bound = tl.maximum(bound, found)
        bound = tl.maximum(bound, min_p)
        total = sum_above + _sum_from(weights, count, bound, BLOCK)
    else:
        scale = _scales(largest, part, chunks, top, divisor, CHUNKS)
        lane = tl.arange(0, CHUNKS)
        last = (part + lane) * BOUNDS + BOUNDS - 1
        total = tl.sum(tl.load(sums + last, mask=lane < chunks, other=0) * scale, 0)
    first = tl.program_id(1) * BLOCK
    for begin in tl.range(first, VOCAB, tl.num_programs(1) * BLOCK):
        each = begin + tl.arange(0, BLOCK)
        logit = tl.load(logits + row * row_stride + each, mask=each < VOCAB, other=0)
        weight = _weight(logit, top, divisor)
        prob = tl.where(weight < bound, 0, weight) / total  # NaN stays
        prob = tl.where(temperature == 0, (each == token).to(tl.float32), prob)
        tl.store(probs + row * VOCAB + each, prob, mask=each < VOCAB)


def launch_target_probs(given: Any) -> torch.Tensor:
    """Launch ``target_probs``."""
    logits = given.logits if given.logits.stride(1) == 1 else given.logits.contiguous()
    rows, vocab_size = logits.shape
    chunks = triton.cdiv(vocab_size, CHUNK)
    is_double = logits.dtype is torch.float64

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(rows, *shape, dtype=dtype, device=logits.device)

    probs = empty(vocab_size)
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
    launch(
        scan_logits_kernel, (rows, chunks), given, CHUNK=CHUNK, TILE=TILE, SAMPLES=_SAMPLES,
        KEY=tl.float64 if is_double else tl.float32, **table, **row,
    )  # fmt: skip
    launch(
        select_weights_kernel, (rows, chunks), given, CHUNK=CHUNK, **table, **selected, **row
    )  # fmt: skip
    writers = min(triton.cdiv(vocab_size, BLOCK), triton.cdiv(WRITERS, max(rows, 1)))
    launch(
        write_probs_kernel, (rows, writers), given, probs=probs, chunks=chunks, BLOCK=BLOCK,
        **selected, **row,
    )  # fmt: skip
    return probs
