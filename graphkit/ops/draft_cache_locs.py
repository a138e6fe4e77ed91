"""KV slots for the draft tokens of a tree, on separate pages where branches need them.

Suffixes: B requests, K topk, S num_steps, D pairs of slots.
"""

from __future__ import annotations

from typing import Annotated, Any

import torch

from graphkit.errors import InputError
from graphkit.ops.packed import locate, read, write
from graphkit.ops.registration import register_op

_PAGE_ARGUMENTS = (
    "extend_lens",
    "num_new_pages_per_topk",
    "source_cache_loc",
    "target_cache_loc",
    "last_page_lens_cumsum",
)


def _uses_pages(given: Any) -> bool:
    """Return whether branches get pages of their own."""
    return bool(given.page_size > 1 and given.topk > 1)


def _check_entries(given: Any) -> None:
    """Refuse missing page arguments, and tensors of too few entries."""
    drafts = given.seq_lens.numel() * given.topk * given.speculative_num_steps
    slots = given.out_cache_loc.numel()
    if not _uses_pages(given):
        if slots != drafts:
            raise InputError(
                f"assign_draft_cache_locs: out_cache_loc has {slots} slots, expected "
                f"[B * K * S] = [{drafts}].",
                field="out_cache_loc",
            )
        return
    for name in _PAGE_ARGUMENTS:
        if getattr(given, name) is None:
            raise InputError(
                f"assign_draft_cache_locs: {name} is None, expected a tensor for topk "
                f"{given.topk} with page_size {given.page_size}.",
                field=name,
            )
    if drafts > slots:
        raise InputError(
            f"assign_draft_cache_locs: out_cache_loc has {slots} slots, expected at least "
            f"B * K * S = {drafts} draft tokens.",
            field="out_cache_loc",
        )
    pairs, length = given.source_cache_loc.numel(), given.duplicate_cache_len
    if length is None or not 0 <= length <= pairs:
        raise InputError(
            f"assign_draft_cache_locs: duplicate_cache_len is {length}, expected 0 to {pairs}, "
            "the length of source_cache_loc. Pass longer source_cache_loc and target_cache_loc.",
            field="source_cache_loc",
        )


@register_op(
    mutates_args=("req_to_token", "out_cache_loc", "source_cache_loc", "target_cache_loc"),
    check=_check_entries,
    ignored=lambda given: () if _uses_pages(given) else _PAGE_ARGUMENTS,
)
def assign_draft_cache_locs(
    req_pool_indices: Annotated[torch.Tensor, "[B] int32 or int64"],
    req_to_token: Annotated[torch.Tensor, "[rows, context] int32 or int64, contiguous"],
    seq_lens: Annotated[torch.Tensor, "[B] int32 or int64"],
    extend_lens: Annotated[torch.Tensor | None, "[B] int32 or int64"],
    num_new_pages_per_topk: Annotated[torch.Tensor | None, "[B] int32 or int64"],
    out_cache_loc: Annotated[torch.Tensor, "[slots] int32 or int64, contiguous"],
    source_cache_loc: Annotated[torch.Tensor | None, "[D] int32 or int64, contiguous"],
    target_cache_loc: Annotated[torch.Tensor | None, "[D] int32 or int64, contiguous"],
    last_page_lens_cumsum: Annotated[torch.Tensor | None, "[B] int32 or int64"],
    duplicate_cache_len: int | None,
    topk: Annotated[int, "K >= 1"],
    speculative_num_steps: Annotated[int, "S >= 1"],
    page_size: Annotated[int, "P >= 1"],
) -> None:
    """Enter newly allocated slots into ``req_to_token`` behind each request's committed tokens.

    With page_size == 1 or topk == 1 each request has K * S new slots, one per draft token. The
    arguments marked *pages* are then ignored and may be None.

    Otherwise branches share no page. Each has ``num_new_pages_per_topk[b]`` pages, branch after
    branch, counted from the page on which the committed tokens end. Branch 0 continues there.
    Every other branch begins with a copy of that page's tokens, which the caller makes by
    ``move_kv_cache(target_cache_loc, source_cache_loc)``. For pages of 4, K = 2, S = 3 and 6
    committed tokens, that is 2 pages per branch (``c`` committed, ``.`` unused)::

        req_to_token    c c c c | c c 0 0 | 0 . . . | c c 1 1 | 1 . . .
        extend_lens                   ^ 14 slots from here to the end
        source, target            c c  -- copied to ->  c c
        out_cache_loc   0 0 0 1 1 1

    Writes outside the table are skipped. Contract of SGLang's kernel of this name (spec_utils.py).
    One launch on the current stream, two with pages. Never synchronises; may be captured.

    Args:
        req_pool_indices: Row of ``req_to_token`` per request.
        req_to_token: Slot of each token of each request; receives the new ones.
        seq_lens: Committed tokens.
        extend_lens: *Pages.* New slots per request:
            K * page_size * pages per branch - seq % page_size.
        num_new_pages_per_topk: *Pages.* Pages per branch, enough for seq % page_size + S tokens.
        out_cache_loc: The new slots of all requests, packed. With pages its first B * K * S
            entries then receive the draft tokens' slots, as [B, K, S].
        source_cache_loc: *Pages.* Receives the slots to copy from, request by request and branch
            by branch.
        target_cache_loc: *Pages.* Receives the slots to copy to.
        last_page_lens_cumsum: *Pages.* Running sum of seq % page_size, each request's included.
        duplicate_cache_len: *Pages.* Entries of source and target that may be written, at least
            (K - 1) * sum of seq % page_size.
        topk: Branches (K).
        speculative_num_steps: Draft tokens per branch (S).
        page_size: Slots per page.

    Shapes:
        req_pool_indices: [B] int64. req_to_token: [rows, context] int32, contiguous.
        seq_lens, extend_lens, num_new_pages_per_topk, last_page_lens_cumsum: [B] int32.
        out_cache_loc: [B * K * S], with pages [sum(extend_lens)], int64, contiguous.
        source_cache_loc, target_cache_loc: [D] int64, D >= duplicate_cache_len, contiguous.
        All may be int32 or int64.

    Raises:
        InputError: A tensor has the wrong shape, dtype, device or layout, a number is out of
            range, or pages are used and one of their arguments is None.
    """
    if seq_lens.numel() == 0:
        return
    lengths = torch.full_like(seq_lens, topk * speculative_num_steps)
    if page_size > 1 and topk > 1:
        assert extend_lens is not None
        lengths = extend_lens
    request, column, is_used = locate(lengths, out_cache_loc.numel())
    token = (req_pool_indices[request], seq_lens[request] + column)
    write(req_to_token, token, out_cache_loc, is_used)
    if page_size == 1 or topk == 1:
        return

    assert num_new_pages_per_topk is not None
    assert last_page_lens_cumsum is not None
    assert source_cache_loc is not None
    assert target_cache_loc is not None
    tails = torch.diff(last_page_lens_cumsum, prepend=last_page_lens_cumsum.new_zeros(1))
    page, branch_len = seq_lens - tails, num_new_pages_per_topk * page_size

    branch = torch.arange(topk, device=seq_lens.device)[:, None]
    step = torch.arange(speculative_num_steps, device=seq_lens.device)
    position = seq_lens[:, None, None] + branch * branch_len[:, None, None] + step
    drafts = out_cache_loc[: position.numel()].view(position.shape)
    drafts.copy_(read(req_to_token, (req_pool_indices[:, None, None], position), drafts))

    source, target = (loc[:duplicate_cache_len] for loc in (source_cache_loc, target_cache_loc))
    request, column, is_used = locate(tails * (topk - 1), source.numel())
    tail = tails[request].clamp(min=1)
    row, first = req_pool_indices[request], page[request] + column % tail
    copied = first + (1 + column // tail) * branch_len[request]
    source.copy_(read(req_to_token, (row, first), source, is_used))
    target.copy_(read(req_to_token, (row, copied), target, is_used))
