"""Prompts of ``linear_scan`` in chunks, for one decay of a head. Contracts: ``ops.recurrent``.

Within a chunk, what its rows add to a state solves a triangular system (arXiv 2412.06464): with the
sums G of the decays and ``L[i, j] = beta[i] * exp(G[i] - G[j]) * dot(key[i], key[j])`` for j < i,
the added values are ``inverse(1 + L) @ (beta * (value - exp(G) * key @ S))``. The inverses of all
chunks, and what their rows read of each other, are computed side by side. Then a program for each
head and block of values goes from chunk to chunk. Without beta (Mamba 2, arXiv 2405.21060) the
values themselves are added.

A chunk begins at a multiple of ``CHUNK`` among the positions of its request. No row reads a later
one, so that prompts which are cut at such positions have the same bits however they are cut.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from graphkit.ops.kernels.launch import launch, wait_for_kernel_before
from graphkit.ops.recurrent import CHUNK

VALUES_OF_PROGRAM = 32
"""Values of a program that goes from chunk to chunk."""


@triton.jit
def tile_offsets(k, v, KEYS: tl.constexpr, VALUES: tl.constexpr, TRANSPOSED: tl.constexpr):
    """Return the offsets of a tile [K, V] in the state of a head."""
    k, v = k[:, None], v[None, :]
    return v * KEYS + k if TRANSPOSED else k * VALUES + v


@triton.jit
def decayed(state, logs, weight):
    """Return a tile [K, V] of a state after its decay, by logs [], [K, 1] or [1, V]."""
    if weight is not None:
        logs = logs * weight
    return state * tl.exp(logs)


@triton.jit
def as_tile(logs, KIND: tl.constexpr):
    """Return decays in a shape that multiplies tiles."""
    if KIND == 1:
        logs = logs[:, None]
    if KIND == 2:
        logs = logs[None, :]
    return logs


@triton.jit
def extended(state, key, added, dtype: tl.constexpr):
    """Return a tile of a state with the product of a key and a value, rounded to a dtype.

    The sum and the product round once, wherever they are compiled.
    """
    return tl.fma(key[:, None], added[None, :], state).to(dtype)


@triton.jit
def current_tile(
    states, updates, weights, pending, row, group, head, k, v, tile, inside, HEADS: tl.constexpr,
    GROUPS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, WIDTH: tl.constexpr,
    UPDATE: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Return a tile of the state before a batch, with the nodes of ``pending``, and its slot."""
    noted = pending + row * (WIDTH + 2)
    slot, depth = tl.load(noted), tl.load(noted + 1).to(tl.int32)
    place = states + ((2 * row + slot) * HEADS + head) * KEYS * VALUES + tile
    state = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    for number in range(depth):
        node = tl.load(noted + 2 + number)
        kept = updates + ((2 * row + slot) * WIDTH + node) * UPDATE
        vector = tl.load(kept + group * KEYS + k, mask=k < KEYS, other=0.0)
        added = tl.load(kept + GROUPS * KEYS + head * VALUES + v, mask=v < VALUES, other=0.0)
        decays = kept + GROUPS * KEYS + HEADS * VALUES
        if KIND == 0:
            logs = tl.load(decays + head)
        elif KIND == 1:
            logs = tl.load(decays + head * KEYS + k, mask=k < KEYS, other=0.0)
        else:
            logs = tl.load(decays + head * VALUES + v, mask=v < VALUES, other=0.0)
        state = decayed(state, as_tile(logs, KIND), weights)
        state = extended(state, vector, added, states.dtype.element_ty).to(tl.float32)
    return state, slot


@triton.jit
def softplus(x):
    """Return ``log(1 + exp(x))``, and x where that is x in float32, as torch does."""
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def chunk_rows(begins, starts, request, chunk, CHUNK: tl.constexpr):
    """Return the rows of a chunk in the batch, [CHUNK], and whether they are the request's."""
    first = tl.load(begins + request)
    count = tl.load(begins + request + 1) - first
    offset = tl.full((), 0, tl.int64)
    if starts is not None:
        offset = tl.load(starts + request) % CHUNK
    row = chunk * CHUNK - offset + tl.arange(0, CHUNK)
    return first + row, (row >= 0) & (row < count)


@triton.jit
def chunk_number(begins, request, chunk, CHUNK: tl.constexpr):
    """Return the number of a chunk among those of all requests.

    A request of n rows has at most ``n // CHUNK + 2`` chunks, wherever its first one is cut.
    """
    return tl.load(begins + request) // CHUNK + 2 * request + chunk


@triton.jit
def unit_rows(pointer, token, inside, lane, stride, KEYS: tl.constexpr, NORMALISE: tl.constexpr):
    """Return keys or queries of rows, [CHUNK, K] in float32."""
    rows = tl.load(
        pointer + token[:, None] * stride + lane[None, :],
        mask=inside[:, None] & (lane < KEYS)[None, :],
        other=0.0,
    ).to(tl.float32)
    if NORMALISE:
        rows = rows / tl.sqrt(tl.sum(rows * rows, 1) + 1e-6)[:, None]
    return rows


@triton.jit
def row_decays(
    decay, bias, weight, columns, token, inside, head, least, most, stride,
    LOG_WEIGHT: tl.constexpr,
):  # fmt: skip
    """Return the sums of the logarithms of decays up to each row, and time steps, [CHUNK]."""
    column = head if columns is None else tl.load(columns + head)
    logs = tl.load(decay + token * stride + column, mask=inside, other=0.0).to(tl.float32)
    step = logs
    if weight is not None:
        if bias is not None:
            logs += tl.load(bias + head).to(tl.float32)
        step = tl.minimum(tl.maximum(softplus(logs), least), most)
        factor = tl.load(weight + head).to(tl.float32)
        if LOG_WEIGHT:
            factor = -tl.exp(factor)
        logs = tl.where(inside, step * factor, 0.0)
    return tl.cumsum(logs, 0), step


@triton.jit
def row_betas(
    beta, columns, token, inside, head, stride, scale, IS_SIGMOID: tl.constexpr
):  # fmt: skip
    """Return the betas of rows, 0 where there is none, [CHUNK]."""
    column = head if columns is None else tl.load(columns + head)
    factor = tl.load(beta + token * stride + column, mask=inside, other=0.0).to(tl.float32)
    if IS_SIGMOID:
        factor = scale / (1.0 + tl.exp(-factor))
    return tl.where(inside, factor, 0.0)


@triton.jit(do_not_specialize=["chunks"])
def prepare_chunks_kernel(
    inverses, scores, begins, starts, query, key, decay, beta, decay_weight, decay_bias,
    decay_columns, beta_columns, chunks, scale, least, most, beta_scale, query_row, query_head,
    key_row, key_head, decay_row, beta_row, HEADS: tl.constexpr, GROUPS: tl.constexpr,
    KEYS: tl.constexpr, NORMALISE: tl.constexpr, LOG_WEIGHT: tl.constexpr, IS_SIGMOID: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, STARTS_EARLY: tl.constexpr,
):  # fmt: skip
    """One program per chunk and head: what rows read of each other, and the inverse of ``1 + L``.

    The inverse is computed row after row.
    """
    wait_for_kernel_before(STARTS_EARLY)
    request, chunk, head = tl.program_id(0) // chunks, tl.program_id(0) % chunks, tl.program_id(1)
    token, inside = chunk_rows(begins, starts, request, chunk, CHUNK)
    if tl.sum(inside.to(tl.int32), 0) > 0:
        lane, place = tl.arange(0, BLOCK_K), tl.arange(0, CHUNK)
        group = head // (HEADS // GROUPS)
        keys = unit_rows(key + group * key_head, token, inside, lane, key_row, KEYS, NORMALISE)
        sums, _ = row_decays(
            decay, decay_bias, decay_weight, decay_columns, token, inside, head, least, most,
            decay_row, LOG_WEIGHT,
        )  # fmt: skip
        first = (chunk_number(begins, request, chunk, CHUNK) * HEADS + head) * CHUNK * CHUNK
        tile = first + place[:, None] * CHUNK + place[None, :]
        queries = unit_rows(
            query + group * query_head, token, inside, lane, query_row, KEYS, NORMALISE
        )
        sees = place[None, :] <= place[:, None]
        factor = tl.exp(tl.where(sees, sums[:, None] - sums[None, :], 0.0))
        products = tl.dot(queries * scale, tl.trans(keys))
        tl.store(scores + tile, tl.where(sees, products * factor, 0.0))
        if beta is not None:
            betas = row_betas(
                beta, beta_columns, token, inside, head, beta_row, beta_scale, IS_SIGMOID
            )
            products = tl.dot(keys, tl.trans(keys))
            is_before = place[None, :] < place[:, None]
            lower = tl.where(is_before, products * factor * betas[:, None], 0.0)
            tl.store(inverses + tile, lower)
            tl.debug_barrier()  # other threads have written what a thread reads
            inverse = tl.where(place[:, None] == place[None, :], 1.0, 0.0)
            for row in range(1, CHUNK):
                factors = tl.load(inverses + first + row * CHUNK + place)
                line = tl.where(place == row, 1.0, 0.0) - tl.sum(factors[:, None] * inverse, 0)
                inverse = tl.where(place[:, None] == row, line[None, :], inverse)
            tl.debug_barrier()
            tl.store(inverses + tile, inverse)


@triton.jit(do_not_specialize=["tokens"])
def scan_chunks_kernel(
    out, states, updates, kept_parents, pending, inverses, scores, rows, begins, starts, query, key,
    value, decay, beta, decay_weight, decay_bias, skip, gate, decay_columns, beta_columns, tokens,
    scale, least, most, beta_scale, query_row, query_head, key_row, key_head, value_row, value_head,
    gate_row, gate_head, decay_row, beta_row, HEADS: tl.constexpr, GROUPS: tl.constexpr,
    KEYS: tl.constexpr, VALUES: tl.constexpr, WIDTH: tl.constexpr, UPDATE: tl.constexpr,
    NORMALISE: tl.constexpr, TRANSPOSED: tl.constexpr, SKIPS_HEAD: tl.constexpr,
    LOG_WEIGHT: tl.constexpr, IS_SIGMOID: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_W: tl.constexpr, STARTS_EARLY: tl.constexpr,
):  # fmt: skip
    """One program per request, head and block of values, from chunk to chunk."""
    wait_for_kernel_before(STARTS_EARLY)
    request, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    group = head // (HEADS // GROUPS)
    k, v = tl.arange(0, BLOCK_K), tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    place = tl.arange(0, CHUNK)
    inside_v = v < VALUES
    held = (k < KEYS)[:, None] & inside_v[None, :]
    tile = tile_offsets(k, v, KEYS, VALUES, TRANSPOSED)
    row = tl.load(rows + request)
    state, slot = current_tile(
        states, updates, None, pending, row, group, head, k, v, tile, held, HEADS, GROUPS, KEYS,
        VALUES, WIDTH, UPDATE, 0,
    )  # fmt: skip
    count = tl.load(begins + request + 1) - tl.load(begins + request)
    if starts is not None:
        count = tl.where(count > 0, count + tl.load(starts + request) % CHUNK, 0)
    for chunk in range((count.to(tl.int32) + CHUNK - 1) // CHUNK):
        token, inside = chunk_rows(begins, starts, request, chunk, CHUNK)
        pairs = (chunk_number(begins, request, chunk, CHUNK) * HEADS + head) * CHUNK * CHUNK
        pairs += place[:, None] * CHUNK + place[None, :]
        keys = unit_rows(key + group * key_head, token, inside, k, key_row, KEYS, NORMALISE)
        sums, step = row_decays(
            decay, decay_bias, decay_weight, decay_columns, token, inside, head, least, most,
            decay_row, LOG_WEIGHT,
        )  # fmt: skip
        mask = inside[:, None] & inside_v[None, :]
        values = tl.load(
            value + token[:, None] * value_row + head * value_head + v[None, :],
            mask=mask,
            other=0.0,
        ).to(tl.float32)
        if beta is not None:
            betas = row_betas(
                beta, beta_columns, token, inside, head, beta_row, beta_scale, IS_SIGMOID
            )
            read = tl.dot(keys, state)
            lacking = betas[:, None] * (values - tl.exp(sums)[:, None] * read)
            added = tl.dot(tl.load(inverses + pairs), lacking)
        else:
            added = values
            if decay_weight is not None:
                added = values * tl.where(inside, step, 0.0)[:, None]
        queries = unit_rows(
            query + group * query_head, token, inside, k, query_row, KEYS, NORMALISE
        )
        result = tl.dot(queries * scale, state) * tl.exp(sums)[:, None]
        result += tl.dot(tl.load(scores + pairs), added)
        last = tl.sum(tl.where(place == CHUNK - 1, sums, 0.0), 0)
        left = keys * tl.exp(last - sums)[:, None]
        state = state * tl.exp(last)
        state += tl.dot(tl.trans(left), added)
        if skip is not None:
            if SKIPS_HEAD:
                result += values * tl.load(skip + head).to(tl.float32)
            else:
                factors = tl.load(skip + head * VALUES + v, mask=inside_v, other=0.0)
                result += values * factors.to(tl.float32)[None, :]
        if gate is not None:
            wide = tl.load(
                gate + token[:, None] * gate_row + head * gate_head + v[None, :], mask=mask,
                other=0.0,
            ).to(tl.float32)  # fmt: skip
            result = result * (wide / (1.0 + tl.exp(-wide)))
        tl.store(
            out + (token[:, None] * HEADS + head) * VALUES + v[None, :],
            result.to(out.dtype.element_ty), mask=mask,
        )  # fmt: skip
    if request == tl.num_programs(0) - 1:
        for begin in range(tl.load(begins + request + 1), tokens, CHUNK):
            token = begin + place  # pads follow the last prompt
            tl.store(
                out + (token[:, None] * HEADS + head) * VALUES + v[None, :],
                tl.zeros([CHUNK, BLOCK_V], out.dtype.element_ty),
                mask=(token < tokens)[:, None] & inside_v[None, :],
            )
    if row > 0:  # that of pads stays as it is
        end = states + ((2 * row + 1 - slot) * HEADS + head) * KEYS * VALUES
        tl.store(end + tile, state.to(states.dtype.element_ty), mask=held)
    if (head == 0) & (tl.program_id(2) == 0):
        lane = tl.arange(0, BLOCK_W)
        whole = tl.full([BLOCK_W], -2, tl.int64)
        parents = kept_parents + (2 * row + 1 - slot) * WIDTH
        tl.store(parents + lane, whole, mask=lane < WIDTH)


def scan_in_chunks(args: Any, others: dict[str, Any]) -> None:
    """Launch ``linear_scan`` of prompts.

    Args:
        args: Arguments of the op.
        others: Parameters that the kernel has in common with that of single rows.
    """
    heads, keys, values = others["HEADS"], others["KEYS"], others["VALUES"]
    chunks = triton.cdiv(args.nodes + CHUNK - 1, CHUNK)  # one more where the first is cut
    common = {
        **others,
        "chunks": chunks,
        "CHUNK": CHUNK,
        "BLOCK_K": max(16, triton.next_power_of_2(keys)),
        "num_stages": 1,
        "enable_fp_fusion": False,  # as in steps
    }
    requests = len(args.rows)
    # Memory follows the rows, not the requests: a graph of prompts has room for several.
    size = len(args.value) // CHUNK + 2 * requests, heads, CHUNK, CHUNK
    scores = torch.empty(size, dtype=torch.float32, device=args.value.device)
    common["scores"] = scores
    common["inverses"] = None if args.beta is None else torch.empty_like(scores)
    launch(
        prepare_chunks_kernel, (requests * chunks, heads), args, num_warps=4,
        **_taken(prepare_chunks_kernel, common),
    )  # fmt: skip
    block_v = max(16, min(VALUES_OF_PROGRAM, triton.next_power_of_2(values)))
    grid = requests, heads, triton.cdiv(values, block_v)
    launch(
        scan_chunks_kernel, grid, args, BLOCK_V=block_v, num_warps=8,
        **_taken(scan_chunks_kernel, common),
    )  # fmt: skip


def _taken(kernel: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options that a kernel or its launch takes."""
    names = {*kernel.arg_names, "num_stages", "enable_fp_fusion"}
    return {name: value for name, value in options.items() if name in names}
