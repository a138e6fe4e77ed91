"""Convolutions and scans of recurrent layers for CUDA. Contracts: ``graphkit.ops.recurrent``."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from graphkit.ops.kernels.launch import launch, wait_for_kernel_before
from graphkit.ops.kernels.recurrent_chunks import (
    as_tile,
    current_tile,
    decayed,
    extended,
    scan_in_chunks,
    softplus,
    tile_offsets,
)

CHANNELS = 256
"""Channels of a program of the convolution."""
TILE = 4096
"""Numbers of a state that a program of the scan holds: 32 for each thread of four warps.

The bits of a sum over keys depend on how a tile is spread over threads, and so on the tile and the
warps. Both follow from the shape of a state alone.
"""
MOST_VALUES = 64
"""Most values of a program of the scan. With fewer keys more programs run instead."""
ROUNDS_PRODUCTS = {"enable_fp_fusion": False}
"""Option of all launches: a product is rounded before it is added.

The threads that share a sum add the same two products, each its own and then that of the other. If
a thread fuses its own product into the addition, their sums differ, and what a node keeps is not
what it has added to the state in other threads.
"""


@triton.jit
def first_and_count(begins, request, nodes):
    """Return the first row of a request and its number of rows."""
    if begins is None:
        first = request * nodes
        count = nodes
    else:
        first = tl.load(begins + request)
        count = (tl.load(begins + request + 1) - first).to(tl.int32)
    return first, count


@triton.jit(do_not_specialize=["nodes", "requests", "tokens"])
def causal_conv_kernel(
    out, states, rows, begins, parents, x, weight, bias, columns, nodes, requests, tokens, x_row,
    x_column, CHANNEL_COUNT: tl.constexpr, COLUMNS: tl.constexpr, TAPS: tl.constexpr,
    WIDTH: tl.constexpr, SILU: tl.constexpr, BLOCK: tl.constexpr, BLOCK_B: tl.constexpr,
    STARTS_EARLY: tl.constexpr,
):  # fmt: skip
    """One program per row and block of channels. A program walks up the path of its node.

    With ``begins``, there is one more per request, which keeps the state of one without rows.
    """
    wait_for_kernel_before(STARTS_EARLY)
    token = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < CHANNEL_COUNT
    is_row = token < tokens
    if begins is None:
        request = token // nodes
        first = request * nodes
        count = tl.full((), 0, tl.int64) + nodes
    else:
        lane = tl.arange(0, BLOCK_B)
        ends = tl.load(begins + 1 + lane, mask=lane < requests, other=9223372036854775807)
        request = tl.sum((ends <= token).to(tl.int64), 0)
        is_row = is_row & (request < requests)  # pads follow the last prompt
        request = tl.where(token < tokens, tl.minimum(request, requests - 1), token - tokens)
        first = tl.load(begins + request)
        count = tl.load(begins + request + 1) - first
    node = tl.where(is_row, token - first, 0)
    row = tl.load(rows + request)
    committed = states + row * (WIDTH + 1) * CHANNEL_COUNT * COLUMNS + channel * COLUMNS
    if begins is None:
        after = committed + (node + 1) * CHANNEL_COUNT * COLUMNS
        keeps = inside
    else:
        after = committed + CHANNEL_COUNT * COLUMNS
        is_end = tl.where(is_row, node == count - 1, (token >= tokens) & (count == 0))
        keeps = inside & is_end
    total = tl.zeros([BLOCK], tl.float32)
    if bias is not None:
        total += tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
    source = channel.to(tl.int64)
    if columns is not None:
        source = tl.load(columns + channel, mask=inside, other=0)
    above = tl.where(is_row, node, -1)
    # A request without rows keeps its state: no input is appended.
    beyond = tl.where(is_row, 0, 1).to(tl.int64)
    REACH: tl.constexpr = TAPS if TAPS > COLUMNS else COLUMNS
    for distance in tl.static_range(REACH):
        if distance > 0:
            beyond = tl.where(above < 0, beyond + 1, beyond)
            if parents is None:
                above = tl.where(above < 0, above, above - 1)
            else:
                parent = tl.load(parents + request * nodes + above, mask=above >= 0, other=-1)
                above = tl.where(above < 0, above, parent)
            beyond = tl.where((above < 0) & (beyond == 0), 1, beyond)
        column = COLUMNS - beyond
        from_rows = tl.load(
            x + (first + above) * x_row + source * x_column, mask=inside & (above >= 0), other=0.0
        )
        from_state = tl.load(
            committed + column, mask=inside & (above < 0) & (column >= 0), other=0.0
        )
        value = tl.where(above >= 0, from_rows, from_state.to(x.dtype.element_ty))
        if distance < TAPS:
            factor = tl.load(weight + channel * TAPS + TAPS - 1 - distance, mask=inside, other=0.0)
            total += value.to(tl.float32) * factor.to(tl.float32)
        if distance < COLUMNS:
            kept = value.to(states.dtype.element_ty)
            if begins is None:
                tl.store(after + COLUMNS - 1 - distance, kept, mask=keeps)
            else:
                for slot in tl.static_range(WIDTH):
                    place = after + slot * CHANNEL_COUNT * COLUMNS + COLUMNS - 1 - distance
                    tl.store(place, kept, mask=keeps)
    result = total.to(out.dtype.element_ty)
    if SILU:
        wide = result.to(tl.float32)
        result = (wide / (1.0 + tl.exp(-wide))).to(out.dtype.element_ty)
    result = tl.where(is_row, result, 0.0)
    tl.store(out + token * CHANNEL_COUNT + channel, result, mask=inside & (token < tokens))


def launch_causal_conv(args: Any, out: torch.Tensor) -> None:
    """Launch ``causal_conv``."""
    channels, columns = args.states.shape[1:]
    block = min(CHANNELS, triton.next_power_of_2(channels))
    tokens, requests = len(args.x), len(args.rows)
    programs = tokens + (0 if args.begins is None else requests)
    launch(
        causal_conv_kernel, (programs, triton.cdiv(channels, block)), args, out=out,
        states=args.states, requests=requests, tokens=tokens, x=args.x, x_row=args.x.stride(0),
        x_column=args.x.stride(1), CHANNEL_COUNT=channels, COLUMNS=columns,
        TAPS=args.weight.shape[1], WIDTH=args.width, SILU=args.silu, BLOCK=block,
        BLOCK_B=1 if args.begins is None else triton.next_power_of_2(requests),
        num_warps=max(1, block // 64), **ROUNDS_PRODUCTS,
    )  # fmt: skip


@triton.jit
def key_vector(vector, NORMALISE: tl.constexpr):
    """Return a loaded key or query in float32."""
    vector = vector.to(tl.float32)
    if NORMALISE:
        vector = vector / tl.sqrt(tl.sum(vector * vector, 0) + 1e-6)
    return vector


@triton.jit
def loaded_row(
    query, key, value, decay, beta, token, exists, head, group, k, v, decay_column, beta_column,
    query_row, query_head, key_row, key_head, value_row, value_head, decay_row, beta_row,
    KEYS: tl.constexpr, VALUES: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Return what a row has of a head, as it is stored; zeros if it does not exist."""
    inside_k, inside_v = (k < KEYS) & exists, (v < VALUES) & exists
    queries = tl.load(query + token * query_row + group * query_head + k, mask=inside_k, other=0.0)
    keys = tl.load(key + token * key_row + group * key_head + k, mask=inside_k, other=0.0)
    values = tl.load(value + token * value_row + head * value_head + v, mask=inside_v, other=0.0)
    if KIND == 0:
        logs = tl.load(decay + token * decay_row + decay_column, mask=exists, other=0.0)
    elif KIND == 1:
        logs = tl.load(decay + token * decay_row + head * KEYS + k, mask=inside_k, other=0.0)
    else:
        logs = tl.load(decay + token * decay_row + head * VALUES + v, mask=inside_v, other=0.0)
    betas = logs  # a loop cannot carry None
    if beta is not None:
        betas = tl.load(beta + token * beta_row + beta_column, mask=exists, other=0.0)
    return queries, keys, values, logs, betas


@triton.jit
def decay_of(
    logs, bias, weight, head, v, least, most, VALUES: tl.constexpr, KIND: tl.constexpr,
    LOG_WEIGHT: tl.constexpr,
):  # fmt: skip
    """Return the logarithm of a decay, and the time step, in the shape of their kind.

    KIND is 0 for one decay of a head, 1 for one of each key, and 2 for one of each value.
    """
    logs = logs.to(tl.float32)
    if bias is not None:
        if KIND == 0:
            logs += tl.load(bias + head).to(tl.float32)
        elif KIND == 2:
            logs += tl.load(bias + head * VALUES + v, mask=v < VALUES, other=0.0).to(tl.float32)
    step = logs
    if weight is not None:
        step = tl.minimum(tl.maximum(softplus(logs), least), most)
        logs = step
        if KIND == 0:
            factor = tl.load(weight + head).to(tl.float32)
            if LOG_WEIGHT:
                factor = -tl.exp(factor)
            logs = step * factor
    return logs, step


@triton.jit(do_not_specialize=["nodes", "tokens"])
def linear_scan_kernel(
    out, states, updates, kept_parents, pending, kept_weight, rows, begins, parents, order, query,
    key, value, decay, beta, decay_weight, decay_bias, skip, gate, decay_columns, beta_columns,
    nodes, tokens, scale, least, most, beta_scale, query_row, query_head, key_row, key_head,
    value_row, value_head, gate_row, gate_head, decay_row, beta_row, HEADS: tl.constexpr,
    GROUPS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, WIDTH: tl.constexpr,
    UPDATE: tl.constexpr, KIND: tl.constexpr, NORMALISE: tl.constexpr, TRANSPOSED: tl.constexpr,
    SKIPS_HEAD: tl.constexpr, LOG_WEIGHT: tl.constexpr, IS_SIGMOID: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_W: tl.constexpr, STARTS_EARLY: tl.constexpr,
):  # fmt: skip
    """One program per request, head and block of values; its tile of the state is in registers.

    A node whose parent is not the node before it begins from the state before the step, and adds
    again what the nodes of its path have added. What a program needs of them it has written itself.
    """
    wait_for_kernel_before(STARTS_EARLY)
    request, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    block = tl.program_id(2)
    group = head // (HEADS // GROUPS)
    k, v = tl.arange(0, BLOCK_K), block * BLOCK_V + tl.arange(0, BLOCK_V)
    inside_v = v < VALUES
    inside = (k < KEYS)[:, None] & inside_v[None, :]
    tile = tile_offsets(k, v, KEYS, VALUES, TRANSPOSED)
    row = tl.load(rows + request)
    first, count = first_and_count(begins, request, nodes)
    dtype: tl.constexpr = states.dtype.element_ty
    weights = None
    if KIND == 2:
        loaded = tl.load(decay_weight + head * KEYS * VALUES + tile, mask=inside, other=0.0)
        if request == 0:
            tl.store(kept_weight + head * KEYS * VALUES + tile, loaded, mask=inside)
        weights = loaded.to(tl.float32)
    decay_column, beta_column = head, head
    if decay_columns is not None:
        decay_column = tl.load(decay_columns + head)
    if beta_columns is not None:
        beta_column = tl.load(beta_columns + head)
    # A row is loaded before the one before it is computed, the first one beside the state.
    following = tl.full((), 0, tl.int64)
    if order is not None:
        following = tl.load(order + request * nodes, mask=count > 0, other=0)
    queries, keys, values, loaded_logs, betas = loaded_row(
        query, key, value, decay, beta, first + following, count > 0, head, group, k, v,
        decay_column, beta_column, query_row, query_head, key_row, key_head, value_row,
        value_head, decay_row, beta_row, KEYS, VALUES, KIND,
    )  # fmt: skip
    initial, slot = current_tile(
        states, updates, weights, pending, row, group, head, k, v, tile, inside, HEADS, GROUPS,
        KEYS, VALUES, WIDTH, UPDATE, KIND,
    )  # fmt: skip
    end = states + ((2 * row + 1 - slot) * HEADS + head) * KEYS * VALUES
    keeps = inside & (row > 0)  # the state of pads stays as it is
    if begins is None:
        tl.store(end + tile, initial.to(dtype), mask=keeps)
    nodes_of_row = (2 * row + 1 - slot) * WIDTH
    state = initial
    before = tl.full((), -1, tl.int64)
    for place in range(count):
        node = following
        token = first + node
        reader, vector, given, logs, factor = queries, keys, values, loaded_logs, betas
        has_next = place + 1 < count
        following = node + 1
        if order is not None:
            following = tl.load(order + request * nodes + place + 1, mask=has_next, other=0)
        queries, keys, values, loaded_logs, betas = loaded_row(
            query, key, value, decay, beta, first + following, has_next, head, group, k, v,
            decay_column, beta_column, query_row, query_head, key_row, key_head, value_row,
            value_head, decay_row, beta_row, KEYS, VALUES, KIND,
        )  # fmt: skip
        parent = node - 1
        if parents is not None:
            parent = tl.load(parents + request * nodes + node)
            if parent != before:
                tl.debug_barrier()  # other threads may have written what a thread reads
                state = initial
                depth = tl.full((), 0, tl.int32)
                above = parent
                while above >= 0:
                    depth += 1
                    above = tl.load(parents + request * nodes + above)
                while depth > 0:
                    above = parent
                    left = depth
                    while left > 1:
                        above = tl.load(parents + request * nodes + above)
                        left -= 1
                    _, above_key, _, above_logs, _ = loaded_row(
                        query, key, value, decay, None, first + above, above >= 0, head, group, k,
                        v, decay_column, beta_column, query_row, query_head, key_row, key_head,
                        value_row, value_head, decay_row, beta_row, KEYS, VALUES, KIND,
                    )  # fmt: skip
                    above_logs, _ = decay_of(
                        above_logs, decay_bias, decay_weight, head, v, least, most, VALUES, KIND,
                        LOG_WEIGHT,
                    )  # fmt: skip
                    kept = updates + (nodes_of_row + above) * UPDATE + GROUPS * KEYS + head * VALUES
                    added = tl.load(kept + v, mask=inside_v, other=0.0)
                    state = decayed(state, as_tile(above_logs, KIND), weights)
                    above_key = key_vector(above_key, NORMALISE)
                    state = extended(state, above_key, added, dtype).to(tl.float32)
                    depth -= 1
            before = node
        logs, step = decay_of(
            logs, decay_bias, decay_weight, head, v, least, most, VALUES, KIND, LOG_WEIGHT
        )
        vector, reader = key_vector(vector, NORMALISE), key_vector(reader, NORMALISE)
        given = given.to(tl.float32)
        added = given
        if (decay_weight is not None) and (beta is None):
            added = given * step
        state = decayed(state, as_tile(logs, KIND), weights)
        if beta is not None:
            factor = factor.to(tl.float32)
            if IS_SIGMOID:
                factor = beta_scale / (1.0 + tl.exp(-factor))
            added = factor * (added - tl.sum(state * vector[:, None], 0))
        state = extended(state, vector, added, dtype).to(tl.float32)
        result = tl.sum(state * (reader * scale)[:, None], 0)
        if skip is not None:
            if SKIPS_HEAD:
                result += given * tl.load(skip + head).to(tl.float32)
            else:
                factors = tl.load(skip + head * VALUES + v, mask=inside_v, other=0.0)
                result += given * factors.to(tl.float32)
        if gate is not None:
            wide = tl.load(
                gate + token * gate_row + head * gate_head + v, mask=inside_v, other=0.0
            ).to(tl.float32)
            result = result * (wide / (1.0 + tl.exp(-wide)))
        tl.store(
            out + (token * HEADS + head) * VALUES + v, result.to(out.dtype.element_ty),
            mask=inside_v,
        )  # fmt: skip
        if begins is None:
            kept = updates + (nodes_of_row + node) * UPDATE
            tl.store(kept + GROUPS * KEYS + head * VALUES + v, added, mask=inside_v)
            decays = kept + GROUPS * KEYS + HEADS * VALUES
            if KIND == 2:
                tl.store(decays + head * VALUES + v, logs, mask=inside_v)
            if block == 0:
                if head % (HEADS // GROUPS) == 0:
                    tl.store(kept + group * KEYS + k, vector, mask=k < KEYS)
                if KIND == 0:
                    tl.store(decays + head, logs)
                if KIND == 1:
                    tl.store(decays + head * KEYS + k, logs, mask=k < KEYS)
                if head == 0:
                    tl.store(kept_parents + nodes_of_row + node, parent)
    if begins is not None:
        if request == tl.num_programs(0) - 1:
            for pad in range(first + count, tokens):  # pads follow the last prompt
                pads = out + (pad * HEADS + head) * VALUES + v
                tl.store(pads, tl.zeros([BLOCK_V], out.dtype.element_ty), mask=inside_v)
        tl.store(end + tile, state.to(dtype), mask=keeps)
        if (head == 0) & (block == 0):
            lane = tl.arange(0, BLOCK_W)
            whole = tl.full([BLOCK_W], -2, tl.int64)
            tl.store(kept_parents + nodes_of_row + lane, whole, mask=lane < WIDTH)


def _blocks(keys: int, values: int) -> dict[str, int]:
    """Return the tile of a program, and its warps."""
    block_k = max(2, triton.next_power_of_2(keys))
    block_v = max(2, min(MOST_VALUES, triton.next_power_of_2(values), max(1, TILE // block_k)))
    return {
        "BLOCK_K": block_k,
        "BLOCK_V": block_v,
        "num_warps": max(1, min(4, block_k * block_v // 1024)),
    }


def _dense_heads(tensor: torch.Tensor) -> torch.Tensor:
    """Return heads whose elements are side by side."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def launch_linear_scan(args: Any, out: torch.Tensor, *, in_chunks: bool | None = None) -> None:
    """Launch ``linear_scan``. Queries, keys, values and gates of dense heads are read in place.

    Args:
        args: Arguments of the op.
        out: Receives the outputs.
        in_chunks: Whether prompts run in chunks where the kernel for chunks takes them; None for
            those of two bytes, since it multiplies ten bits of each number.
    """
    heads, (groups, keys), values = args.states.shape[1], args.key.shape[1:], args.value.shape[2]
    query, key, value = map(_dense_heads, (args.query, args.key, args.value))
    gate = None if args.gate is None else _dense_heads(args.gate)
    is_dense = args.decay.dim() == 2 and args.decay.stride(1) == 1
    decay = args.decay if is_dense or args.decay[:1].is_contiguous() else args.decay.contiguous()
    beta = args.beta
    if beta is not None and beta.stride(1) != 1:
        beta = beta.contiguous()
    weight, skip = args.decay_weight, args.skip
    kind = 2 if weight is not None and weight.dim() == 3 else int(decay.dim() == 3)
    blocks = _blocks(keys, values)
    width = args.updates.shape[2]
    others = {
        "out": out, "states": args.states, "updates": args.updates,
        "kept_parents": args.kept_parents, "pending": args.pending,
        "kept_weight": args.kept_weight, "query": query, "UPDATE": args.updates.shape[3],
        "key": key, "value": value, "gate": gate, "decay": decay, "beta": beta,
        "query_row": query.stride(0), "query_head": query.stride(1), "key_row": key.stride(0),
        "key_head": key.stride(1), "value_row": value.stride(0), "value_head": value.stride(1),
        "gate_row": 0 if gate is None else gate.stride(0),
        "gate_head": 0 if gate is None else gate.stride(1), "decay_row": decay.stride(0),
        "tokens": len(value),
        "beta_row": 0 if beta is None else beta.stride(0), "HEADS": heads, "GROUPS": groups,
        "KEYS": keys, "VALUES": values, "WIDTH": width, "NORMALISE": args.normalise,
        "TRANSPOSED": args.transposed, "SKIPS_HEAD": skip is not None and skip.numel() == heads,
        "LOG_WEIGHT": args.log_weight, "IS_SIGMOID": args.beta_scale != 0,
        "BLOCK_W": triton.next_power_of_2(width),
    }  # fmt: skip
    if in_chunks is None:
        in_chunks = value.element_size() == 2
    if in_chunks and args.begins is not None and kind == 0:
        scan_in_chunks(args, others)
        return
    grid = len(args.rows), heads, triton.cdiv(values, blocks["BLOCK_V"])
    launch(
        linear_scan_kernel, grid, args, KIND=kind, **others, **blocks, **ROUNDS_PRODUCTS
    )  # fmt: skip


@triton.jit(do_not_specialize=["limit"])
def commit_scans_kernel(
    pending, kept_parents, rows, nodes, limit, WIDTH: tl.constexpr, STARTS_EARLY: tl.constexpr
):
    """One program per request."""
    wait_for_kernel_before(STARTS_EARLY)
    request = tl.program_id(0)
    row, last = tl.load(rows + request), tl.load(nodes + request).to(tl.int64)
    if (row > 0) & (row < limit) & (last >= 0) & (last < WIDTH):
        noted = pending + row * (WIDTH + 2)
        slot = 1 - tl.load(noted)
        parents = kept_parents + (2 * row + slot) * WIDTH
        depth = tl.full((), 0, tl.int32)
        above = last
        while (above >= 0) & (depth < WIDTH):
            depth += 1
            above = tl.load(parents + above)
        depth = tl.where(above == -2, 0, depth)
        tl.store(noted, slot)
        tl.store(noted + 1, depth.to(tl.int64))
        above = last
        while depth > 0:
            depth -= 1
            tl.store(noted + 2 + depth, above)
            above = tl.load(parents + above)


def launch_commit_scans(args: Any) -> None:
    """Launch ``commit_scans``."""
    launch(
        commit_scans_kernel, (len(args.rows),), args, limit=len(args.kept_parents),
        WIDTH=args.kept_parents.shape[2], num_warps=1,
    )  # fmt: skip
