"""Attention of a few new rows per request over a paged KV cache.

Dimensions: B requests, W most query rows of a request, C columns of the mask, T rows of all
requests, N query heads, M key-value heads, D head size of keys, E head size of values, P pages per
request, S page size.

Further suffixes: B1 requests + 1, G query heads per key-value head, L = P * page size keys.
"""

# ruff: noqa: N803, N806, N815 - suffixes of tensor names are dimensions
from __future__ import annotations

from functools import reduce
from math import gcd
from typing import Annotated, Any, NamedTuple

import torch
from torch.nn.functional import pad

from graphkit.errors import AttentionError
from graphkit.ops.attention_layout import DenseLayout
from graphkit.ops.linear import CPU_TILE
from graphkit.ops.registration import register_op

MAX_HEAD_DIM, MAX_REST_DIM = 512, 128
"""Largest head size of values; most elements that a key has more."""
BLOCK_KEYS = 128
"""Keys that the reference adds in one product. MKL 2024.2 adds at most 192 in order: those of a
block and of a tree of up to 64 nodes."""


def _check(args: Any) -> None:
    """Refuse heads, sizes, strides and chunks that the kernel does not take."""
    heads, key_dim = args.key_cache.shape[1:]
    query_heads, value_dim = args.query_TND.shape[1], args.value_cache.shape[2]
    if not 1 <= value_dim <= MAX_HEAD_DIM:
        _refuse(f"the head size of values is {value_dim}", f"1 to {MAX_HEAD_DIM}")
    if not 0 <= key_dim - value_dim <= MAX_REST_DIM:
        expected = f"{value_dim}, the head size of values, to {value_dim + MAX_REST_DIM}"
        _refuse(f"the head size of keys is {key_dim}", expected)
    if not heads or query_heads % heads:
        _refuse(f"query_TND has {query_heads} heads", f"a multiple of the cache's {heads}")
    if args.key_cache.stride(2) != 1 or args.value_cache.stride(2) != 1:
        _refuse("the caches have gaps between elements", "memory contiguous in the head size")
    slots, page_size = len(args.key_cache), args.page_size
    if slots % page_size:
        _refuse(f"the caches have {slots} slots", f"whole pages of {page_size}")
    if args.chunked and not args.window:
        _refuse("chunked is True and window is 0", "the tokens of a chunk as window")


def _refuse(fault: str, expected: str) -> None:
    raise AttentionError(f"paged_attention: {fault}, expected {expected}.")


@register_op(
    check=_check,
    sizes_from=("key_cache", "value_cache", "page_table"),
    error=AttentionError,
    is_costly=True,
)
def paged_attention(
    query_TND: Annotated[torch.Tensor, "[T, N, D] float16 or bfloat16 or float32"],
    key_cache: Annotated[
        torch.Tensor, "[slots, M, D] float16 or bfloat16 or float32 or float8_e4m3fn"
    ],
    value_cache: Annotated[
        torch.Tensor, "[slots, M, E] float16 or bfloat16 or float32 or float8_e4m3fn"
    ],
    page_table: Annotated[torch.Tensor, "[B, P] int32"],
    cache_seqlens_B: Annotated[torch.Tensor, "[B] int32"],
    cu_seqlens_q_B1: Annotated[torch.Tensor, "[B + 1] int32"],
    mask: Annotated[torch.Tensor | None, "[B, W, C >= W] bool"],
    scale: float,
    page_size: Annotated[int, "S >= 1"],
    max_seqlen_q: Annotated[int, "W >= 1"],
    window: Annotated[int, "window >= 0"] = 0,
    softcap: Annotated[float, "softcap >= 0"] = 0.0,
    sinks_N: Annotated[torch.Tensor | None, "[N] float16 or bfloat16 or float32"] = None,
    key_scale_M: Annotated[torch.Tensor | None, "[M] float32"] = None,
    value_scale_M: Annotated[torch.Tensor | None, "[M] float32"] = None,
    chunked: bool = False,
    follows_store: bool = False,  # noqa: ARG001 - for the CUDA kernel
    row_invariant: bool = True,  # noqa: ARG001 - as follows_store
) -> Annotated[torch.Tensor, "[T, N, E] query_TND.dtype"]:
    """Attend from each query row to the visible keys of its request.

    Request b has the rows from ``cu_seqlens_q_B1[b]`` up to the next entry. Without a mask they
    are its last tokens: query i of n sees the first (keys - n + i + 1) keys, none if that is
    negative, as for pad rows. A mask's C columns stand for the last C keys of its request: query i
    sees such a key where ``mask[b, i, column]`` is True, and every key before them. C = W is the
    tree of a verify, whose rows are those keys. C > W is the tree of a draft step, whose rows see
    their ancestors of earlier steps. Columns before the first key are ignored. With a mask every
    request has W rows.

    A value may be the first part of its key: pass a view of the keys as ``value_cache``, as a pool
    of latents does, and the kernel loads it once. With a window a query sees the last ``window`` of
    the keys that it would see without it, itself included. Chunked windows begin at a multiple of
    ``window``: a query that would see n keys sees the last (n - 1) % window + 1 of them. Keys
    outside all windows of a request are not read.

    Keys and values that no query of their request may see, NaN included, never reach the output.
    A query that sees no key gets zeros, and so does a row behind ``cu_seqlens_q_B1[B]``. Sums run
    in float32. On CUDA, attention weights are rounded to float16 if the cache is of float8_e4m3fn
    and the query has 16 bits. A length beyond the page table is cut to its end.

    One or two launches.

    Args:
        query_TND: Query rows, the rows of a request next to each other. N is a multiple of M.
        key_cache: Keys of one layer by slot. E <= D <= E + 128. The number of slots is a multiple
            of page_size.
        value_cache: Values of one layer by slot. E is at most 512.
        page_table: Page p of request b holds its keys from p * page_size on. Entries behind its
            last key are pages of the cache too, such as 0: their keys may be read, without an
            effect.
        cache_seqlens_B: Keys of each request.
        cu_seqlens_q_B1: Running sum of each request's query rows, from 0.
        mask: Which of the last keys each query sees; None for a chain.
        scale: Factor on the scores.
        page_size: Slots per page.
        max_seqlen_q: Upper bound of a request's query rows (W). If a request has more, some rows
            are undefined.
        window: Most keys that a query sees; 0 for all.
        softcap: Scaled scores s become softcap * tanh(s / softcap) (Gemma 2, arXiv:2408.00118); 0
            leaves them.
        sinks_N: Score of one more key per query head, whose value is zero (gpt-oss).
        key_scale_M: Factor of the keys of each head, as ``store_kv`` divides by it; None for 1.
        value_scale_M: Factor of the values of each head; None for 1.
        chunked: Whether a query sees the keys of its own chunk of ``window`` positions alone
            (Llama 4).
        follows_store: Whether all arguments but ``query_TND``, and all keys and values before the
            rows of each request (with a mask, before its columns), were written before the last
            ``store_kv`` or ``store_rotated_heads`` on this stream. If so, the CUDA kernel may read
            them while that store runs.
        row_invariant: Whether the bits of a row depend on the row and the keys that it sees alone,
            on CUDA as in the reference. If not, the kernel divides the keys as is fastest for the
            shapes of the call.

    Returns:
        The attended values, [T, N, E] of the dtype of query_TND.
    """
    (tokens, query_heads, _), (requests, pages) = query_TND.shape, page_table.shape
    heads, value_dim = value_cache.shape[1:]
    if not (tokens and requests and pages):
        return query_TND.new_zeros(tokens, query_heads, value_dim)
    layout = DenseLayout(
        tokens, page_table, cache_seqlens_B, cu_seqlens_q_B1, mask, page_size, max_seqlen_q, window,
        chunked,
    )  # fmt: skip
    key_BLMD, value_BLME = (rows.float() for rows in layout.keys(key_cache, value_cache))
    if key_scale_M is not None:
        key_BLMD = key_BLMD * key_scale_M[:, None]
    if value_scale_M is not None:
        value_BLME = value_BLME * value_scale_M[:, None]
    query_BWND, visible_BWL = layout.pad(query_TND.float()), layout.visible_BWL
    spare = -query_BWND.shape[1] % (CPU_TILE // gcd(CPU_TILE, query_heads // heads))
    if spare:
        query_BWND = pad(query_BWND, (0, 0, 0, 0, 0, spare))
        visible_BWL = pad(visible_BWL, (0, 0, 0, spare))
    query_BMWGD = query_BWND.unflatten(2, (heads, -1)).transpose(1, 2)
    scores_BMRL = query_BMWGD.flatten(2, 3) @ key_BLMD.permute(0, 2, 3, 1) * scale
    scores_BMWGL = scores_BMRL.unflatten(2, query_BMWGD.shape[2:4])
    if softcap:
        scores_BMWGL = softcap * (scores_BMWGL / softcap).tanh()
    scores_BMWGL = scores_BMWGL.masked_fill(~visible_BWL[:, None, :, None], -torch.inf)
    out_BMWGE = _attended(scores_BMWGL, value_BLME, sinks_N, _tree(mask, cache_seqlens_B))
    out_BWNE = out_BMWGE.transpose(1, 2).flatten(2, 3)
    # Without empty rows, whose softmax is NaN.
    out_TNE = layout.pack(out_BWNE[:, : out_BWNE.shape[1] - spare])
    return out_TNE.to(query_TND.dtype)


class _Tree(NamedTuple):
    """Where the keys of a mask lie, and where those that a row sees lie on its path.

    Attributes:
        first_B: The first key of the mask.
        place_BWC: Place of each key, if the row sees it, among all that the row sees.
    """

    first_B: torch.Tensor
    place_BWC: torch.Tensor


def _tree(mask: torch.Tensor | None, cache_seqlens_B: torch.Tensor) -> _Tree | None:
    if mask is None:
        return None
    first_B = cache_seqlens_B - mask.shape[2]
    return _Tree(first_B, first_B[:, None, None] + mask.cumsum(2) - 1)


def _attended(
    scores_BMWGL: torch.Tensor,
    value_BLME: torch.Tensor,
    sinks_N: torch.Tensor | None,
    tree: _Tree | None,
) -> torch.Tensor:
    """Return the mean of the values by the softmax of the scores and of the head's sink.

    Columns of ones behind the values add up the weights, in the order of the keys. A sum in lanes
    would depend on the places of the keys that a row does not see, so that a node of a tree would
    have other bits than the chain of its path.
    """
    heads, groups, dim = *scores_BMWGL.shape[1:4:2], value_BLME.shape[-1]
    top_BMWG1, sinks_MWG1 = scores_BMWGL.amax(-1, keepdim=True), None
    if sinks_N is not None:
        sinks_MWG1 = sinks_N.float().view(heads, 1, groups, 1)
        top_BMWG1 = top_BMWG1.maximum(sinks_MWG1)
    weights_BMWGL = (scores_BMWGL - top_BMWG1).exp()
    longer_BMLE = pad(value_BLME, (0, CPU_TILE - dim % CPU_TILE), value=1.0).transpose(1, 2)
    if weights_BMWGL.shape[-1] > BLOCK_KEYS:
        sums_BMRE = _sums_by_blocks(weights_BMWGL, longer_BMLE, tree)
    else:
        sums_BMRE = weights_BMWGL.flatten(2, 3) @ longer_BMLE
    sums_BMWGE: torch.Tensor = sums_BMRE.unflatten(2, scores_BMWGL.shape[2:4])
    total_BMWG1 = sums_BMWGE[..., dim : dim + 1]
    if sinks_MWG1 is not None:
        total_BMWG1 = total_BMWG1 + (sinks_MWG1 - top_BMWG1).exp()
    out_BMWGE: torch.Tensor = sums_BMWGE[..., :dim] / total_BMWG1
    return out_BMWGE


def _sums_by_blocks(
    weights_BMWGL: torch.Tensor, value_BMLE: torch.Tensor, tree: _Tree | None
) -> torch.Tensor:
    """Return the products of weights and values, [B, M, W * G, E], added by blocks of keys.

    A block of a row has the keys of its places on the path of the row: those of a tree lie behind
    the others, in each block that they may belong to.
    """
    spare = -weights_BMWGL.shape[-1] % BLOCK_KEYS
    weights_BMWGL, value_BMLE = pad(weights_BMWGL, (0, spare)), pad(value_BMLE, (0, 0, 0, spare))
    keys = weights_BMWGL.shape[-1]
    own_BMWGL = weights_BMWGL
    key_L = torch.arange(keys, device=weights_BMWGL.device)
    if tree is not None:
        is_before_BL = key_L < tree.first_B[:, None]
        own_BMWGL = weights_BMWGL * is_before_BL[:, None, None, None]
    weights_BMKRL = own_BMWGL.flatten(2, 3).unflatten(-1, (-1, BLOCK_KEYS)).transpose(2, 3)
    value_BMKLE = value_BMLE.unflatten(2, (-1, BLOCK_KEYS))
    if tree is not None:
        place_BWC = pad(tree.place_BWC, (0, 0, 0, own_BMWGL.shape[2] - tree.place_BWC.shape[1]))
        column_BC = tree.first_B[:, None] + torch.arange(place_BWC.shape[2], device=key_L.device)
        index_BC = column_BC.clamp(0, keys - 1).long()
        shape = *own_BMWGL.shape[:4], index_BC.shape[1]
        of_tree_BMWGC = weights_BMWGL.gather(-1, index_BC[:, None, None, None].expand(shape))
        of_tree_BMWGC = of_tree_BMWGC * (column_BC >= 0)[:, None, None, None]
        block_K = torch.arange(keys // BLOCK_KEYS, device=key_L.device)
        is_own_BKWC = (place_BWC // BLOCK_KEYS)[:, None] == block_K[:, None, None]
        of_tree_BMKWGC = of_tree_BMWGC[:, :, None] * is_own_BKWC[:, None, :, :, None]
        weights_BMKRL = torch.cat((weights_BMKRL, of_tree_BMKWGC.flatten(3, 4)), -1)
        shape = *value_BMLE.shape[:2], index_BC.shape[1], value_BMLE.shape[3]
        of_tree_BMCE = value_BMLE.gather(2, index_BC[:, None, :, None].expand(shape))
        of_tree_BMKCE = of_tree_BMCE[:, :, None].expand(-1, -1, len(block_K), -1, -1)
        value_BMKLE = torch.cat((value_BMKLE, of_tree_BMKCE), 3)
    sums_BMRE: torch.Tensor = reduce(torch.add, (weights_BMKRL @ value_BMKLE).unbind(2))
    return sums_BMRE
