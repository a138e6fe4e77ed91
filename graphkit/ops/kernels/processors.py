"""Logits of requests with processors for CUDA. Contract: ``graphkit.ops.processors``."""

from typing import Any

import torch
import triton
import triton.language as tl

from graphkit.ops.kernels.launch import launch, wait_for_kernel_before
from graphkit.ops.processors import CHANGES, PART, Kind, Processed, empty_processed

PENALTIES = tl.constexpr(int(Kind.PENALTIES))
LOGPROBS = tl.constexpr(int(Kind.LOGPROBS))
PROGRAMS = 264
"""Programs of a launch, two per multiprocessor of an H100, or one per row."""
_BIAS = tl.constexpr(int(Kind.BIAS))
_LEAST_LENGTH = tl.constexpr(int(Kind.LEAST_LENGTH))
_CHANGES = tl.constexpr(int(CHANGES))


@triton.jit
def _penalised(
    x, token, is_token, request, node, tree, token_counts, penalties, width,
    VOCAB: tl.constexpr, IS_DOUBLE: tl.constexpr,
):  # fmt: skip
    """Return logits of tokens after the penalties of a request.

    ``tree`` has the tokens of its tree and the mask of the node.
    """
    KEY: tl.constexpr = tl.float64 if IS_DOUBLE else tl.float32
    tokens_of_tree, mask_of_node = tree
    repetition = tl.load(penalties + request * 3).to(KEY)
    presence = tl.load(penalties + request * 3 + 1).to(KEY)
    frequency = tl.load(penalties + request * 3 + 2).to(KEY)
    count = tl.load(token_counts + request * VOCAB + token, mask=is_token, other=0)
    on_path = tl.zeros_like(count)
    for other in range(1, width):
        is_on_path = other <= node
        if mask_of_node is not None:
            is_on_path = tl.load(mask_of_node + other) != 0
        drafted = tl.load(tokens_of_tree + other)
        on_path += ((token == drafted) & is_on_path).to(tl.int32)
    number = (count >> 1) + on_path
    divided = x / repetition if IS_DOUBLE else tl.div_rn(x, repetition)
    scaled = tl.where(x > 0, divided, x * repetition)
    x = tl.where((count != 0) | (on_path > 0), scaled, x)
    return x - frequency * number.to(KEY) - tl.where(number > 0, presence, 0)


@triton.jit(do_not_specialize=["width"])
def process_logits_kernel(
    processed, is_processed, log_sums, logits, req_pool_indices, candidates, tree_mask, positions,
    kinds, token_counts, penalties, bias_ids, biases, least_lens, stop_ids, nodes, row_stride,
    column_stride, width, parts, VOCAB: tl.constexpr, PART: tl.constexpr, BLOCK: tl.constexpr,
    IDS: tl.constexpr, BLOCK_X: tl.constexpr, STOPS: tl.constexpr, BLOCK_Y: tl.constexpr,
    IS_DOUBLE: tl.constexpr, STARTS_EARLY: tl.constexpr,
):  # fmt: skip
    """Several programs per row, each of every so many parts; none if there are no processors."""
    wait_for_kernel_before(STARTS_EARLY)
    KEY: tl.constexpr = tl.float64 if IS_DOUBLE else tl.float32
    row = tl.program_id(0).to(tl.int64)
    first_part = tl.program_id(1)
    flat = row
    if nodes is not None:
        flat = tl.load(nodes + row)
    is_pad = flat < 0
    flat = tl.maximum(flat, 0)
    request = tl.load(req_pool_indices + flat // width)
    kind = tl.where(is_pad, 0, tl.load(kinds + request))
    if first_part == 0:
        tl.store(is_processed + row, (kind & _CHANGES) != 0)
    for part in tl.range(first_part, tl.where(kind != 0, parts, 0), tl.num_programs(1)):
        begin, node = part * PART, flat % width
        end = tl.minimum(begin + PART, VOCAB)
        token = begin + tl.arange(0, BLOCK)
        is_token = token < end
        source = logits + row * row_stride
        target = processed + row * VOCAB
        x = tl.load(source + token.to(tl.int64) * column_stride, mask=is_token, other=-float("inf"))
        x = x.to(KEY)
        if (kind & LOGPROBS) != 0:
            value = x.to(tl.float32)
            top = tl.max(value, 0)
            # A part may have no finite logit, of which the weights are NaN.
            weight = tl.where(value == -float("inf"), 0, tl.exp(value - top))
            tl.store(log_sums + row * parts + part, top + tl.log(tl.sum(weight, 0)))
        if (kind & _CHANGES) != 0:
            tree = (candidates + (flat - node), None)
            if tree_mask is not None:
                tree = (candidates + (flat - node), tree_mask + flat * width)
            if (kind & PENALTIES) != 0:
                x = _penalised(x, token, is_token, request, node, tree, token_counts, penalties,
                               width, VOCAB, IS_DOUBLE)  # fmt: skip
            tl.store(target + token, x, mask=is_token)
            if (kind & _BIAS) != 0:
                entry = tl.arange(0, BLOCK_X)
                biased = tl.load(bias_ids + request * IDS + entry, mask=entry < IDS, other=-1)
                is_biased = (biased >= begin) & (biased < end)
                bias = tl.load(biases + request * IDS + entry, mask=is_biased, other=0)
                y = tl.load(source + biased.to(tl.int64) * column_stride, mask=is_biased, other=0)
                y = y.to(KEY) + bias.to(KEY)
                if (kind & PENALTIES) != 0:
                    y = _penalised(y, biased, is_biased, request, node, tree, token_counts,
                                   penalties, width, VOCAB, IS_DOUBLE)  # fmt: skip
                tl.debug_barrier()  # behind the stores above
                tl.store(target + biased, y, mask=is_biased)
            if (kind & _LEAST_LENGTH) != 0:
                # No penalty changes -inf, so that these stores may come last.
                entry = tl.arange(0, BLOCK_Y)
                stop = tl.load(stop_ids + request * STOPS + entry, mask=entry < STOPS, other=-1)
                is_early = tl.load(positions + row) + 1 < tl.load(least_lens + request)
                is_excluded = (stop >= begin) & (stop < end) & is_early
                tl.debug_barrier()
                nothing = tl.zeros_like(stop).to(KEY) - float("inf")
                tl.store(target + stop, nothing, mask=is_excluded)


def launch_process_logits(args: Any) -> Processed:
    """Launch ``process_logits``."""
    processed, is_processed, log_sums = results = empty_processed(args)
    logits, (rows, vocab) = args.logits, args.logits.shape
    ids, stops = args.bias_ids.shape[1], args.stop_ids.shape[1]
    parts = log_sums.shape[1]
    programs = min(parts, triton.cdiv(PROGRAMS, max(rows, 1)))
    launch(
        process_logits_kernel, (rows, programs), args, parts=parts, processed=processed,
        is_processed=is_processed, log_sums=log_sums, logits=logits, row_stride=logits.stride(0),
        column_stride=logits.stride(1), width=args.candidates.shape[1], VOCAB=vocab, PART=PART,
        BLOCK=min(PART, triton.next_power_of_2(vocab)), IDS=ids,
        BLOCK_X=triton.next_power_of_2(ids), STOPS=stops, BLOCK_Y=triton.next_power_of_2(stops),
        IS_DOUBLE=logits.dtype is torch.float64, num_warps=8,
    )  # fmt: skip
    return results
