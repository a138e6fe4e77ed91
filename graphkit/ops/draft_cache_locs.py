"""Give the draft tokens of a tree their KV slots, on pages of their own where branches need them.

Suffixes: B requests, K topk, S num_steps, D pairs of slots.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from graphkit.errors import InputError
from graphkit.ops.packed import find_places, read, write
from graphkit.ops.slot_arguments import Demands

_DENSE = Demands(
    "assign_draft_cache_locs",
    req_pool_indices="B",
    req_to_token="rows context!",
    seq_lens="B",
    out_cache_loc="B*K*S!",
    topk="K",
    speculative_num_steps="S",
    page_size="P",
)
_PAGED = Demands(
    "assign_draft_cache_locs",
    req_pool_indices="B",
    req_to_token="rows context!",
    seq_lens="B",
    extend_lens="B",
    num_new_pages_per_topk="B",
    out_cache_loc="slots!",
    source_cache_loc="D!",
    target_cache_loc="D!",
    last_page_lens_cumsum="B",
    topk="K",
    speculative_num_steps="S",
    page_size="P",
)


@torch.library.custom_op(
    "graphkit::assign_draft_cache_locs",
    mutates_args=("req_to_token", "out_cache_loc", "source_cache_loc", "target_cache_loc"),
    device_types="cpu",
)
def assign_draft_cache_locs(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    seq_lens: torch.Tensor,
    extend_lens: torch.Tensor | None,
    num_new_pages_per_topk: torch.Tensor | None,
    out_cache_loc: torch.Tensor,
    source_cache_loc: torch.Tensor | None,
    target_cache_loc: torch.Tensor | None,
    last_page_lens_cumsum: torch.Tensor | None,
    duplicate_cache_len: int | None,
    topk: int,
    speculative_num_steps: int,
    page_size: int,
) -> None:
    """Enter newly allocated slots into ``req_to_token``, after each request's committed tokens.

    With page_size == 1 or topk == 1 they are a request's K * S draft tokens, and that is all: the
    arguments marked *pages* are not looked at and may be None.

    Otherwise branches share no page. Each has ``num_new_pages_per_topk[b]`` pages, one branch after
    the other, counted from the page on which the committed tokens end. Branch 0 goes on there;
    every other branch begins with a copy of that page's tokens, which the caller makes by
    ``move_kv_cache(target_cache_loc, source_cache_loc)``. For pages of 4, K = 2, S = 3 and 6
    committed tokens, that is 2 pages per branch (``c`` committed, ``.`` never used)::

        req_to_token    c c c c | c c 0 0 | 0 . . . | c c 1 1 | 1 . . .
        extend_lens                   ^ 14 slots from here to the end
        source, target            c c  -- copied to ->  c c
        out_cache_loc   0 0 0 1 1 1

    One launch on the current stream, with pages two; never synchronises, may be captured. What
    would lie outside the table is left out.

    Args:
        req_pool_indices: Row of ``req_to_token`` per request.
        req_to_token: Slot of each token of each request; gets the new ones.
        seq_lens: Committed tokens.
        extend_lens: *Pages.* New slots per request:
            K * page_size * pages per branch - seq % page_size.
        num_new_pages_per_topk: *Pages.* Pages per branch: what seq % page_size + S tokens need.
        out_cache_loc: The new slots of all requests, packed. With pages its first B * K * S places
            then get the draft tokens' slots, as [B, K, S].
        source_cache_loc: *Pages.* Gets the slots to copy from: request by request, branch by
            branch.
        target_cache_loc: *Pages.* Gets the slots to copy to.
        last_page_lens_cumsum: *Pages.* Running sum of seq % page_size, each request's included.
        duplicate_cache_len: *Pages.* (K - 1) * sum of seq % page_size, or more: places of source
            and target that may be written.
        topk: Branches (K).
        speculative_num_steps: Draft tokens per branch (S).
        page_size: Slots per page.

    Shapes:
        req_pool_indices: [B] int64. req_to_token: [rows, context] contiguous int32.
        seq_lens, extend_lens, num_new_pages_per_topk, last_page_lens_cumsum: [B] int32.
        out_cache_loc: [B * K * S], with pages [sum(extend_lens)], contiguous int64.
        source_cache_loc, target_cache_loc: [D], D >= duplicate_cache_len, contiguous int64.
        Every tensor may be int32 or int64.

    Raises:
        InputError: A shape, dtype, device or number does not fit, or pages are needed and an
            argument of theirs is None.
    """
    _assign(
        _enter, _branch, req_pool_indices, req_to_token, seq_lens, extend_lens,
        num_new_pages_per_topk, out_cache_loc, source_cache_loc, target_cache_loc,
        last_page_lens_cumsum, duplicate_cache_len, topk, speculative_num_steps, page_size,
    )  # fmt: skip


@assign_draft_cache_locs.register_fake
def _(*_: object) -> None:
    """Nothing is returned, so there is no shape to tell."""


@assign_draft_cache_locs.register_kernel("cuda")
def _(*arguments: Any) -> None:
    from graphkit.ops.kernels.draft_cache_locs import launch_branch, launch_enter

    with torch.cuda.device(arguments[0].device):
        _assign(launch_enter, launch_branch, *arguments)


def _assign(
    enter: Callable[..., None],
    branch: Callable[..., None],
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    seq_lens: torch.Tensor,
    extend_lens: torch.Tensor | None,
    num_new_pages_per_topk: torch.Tensor | None,
    out_cache_loc: torch.Tensor,
    source_cache_loc: Any,
    target_cache_loc: Any,
    last_page_lens_cumsum: torch.Tensor | None,
    duplicate_cache_len: int | None,
    topk: int,
    speculative_num_steps: int,
    page_size: int,
) -> None:
    """Check, then ``enter`` all slots into the table and, with pages, ``branch`` out from there."""
    table = (req_pool_indices, req_to_token, seq_lens)
    numbers = (topk, speculative_num_steps, page_size)
    if page_size == 1 or topk == 1:
        _DENSE.check(*table, out_cache_loc, *numbers)
        enter(*table, out_cache_loc, None, topk * speculative_num_steps)
        return
    _PAGED.check(
        *table, extend_lens, num_new_pages_per_topk, out_cache_loc, source_cache_loc,
        target_cache_loc, last_page_lens_cumsum, *numbers,
    )  # fmt: skip
    drafts = seq_lens.numel() * topk * speculative_num_steps
    _check_room("out_cache_loc", "slots for draft tokens", drafts, out_cache_loc)
    _check_room("source_cache_loc", "duplicate_cache_len", duplicate_cache_len, source_cache_loc)
    enter(*table, out_cache_loc, extend_lens, 0)
    branch(
        *table, out_cache_loc[:drafts], num_new_pages_per_topk, last_page_lens_cumsum,
        source_cache_loc[:duplicate_cache_len], target_cache_loc[:duplicate_cache_len], *numbers,
    )  # fmt: skip


def _check_room(name: str, what: str, needed: int | None, tensor: torch.Tensor) -> None:
    if needed is None or not 0 <= needed <= tensor.numel():
        raise InputError(
            f"{_PAGED.op} got {what} = {needed}: it must be 0 to {tensor.numel()}, the length of "
            f"{name}. Pass a longer {name}.",
            field=name,
        )


def _enter(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    seq_lens: torch.Tensor,
    out_cache_loc: torch.Tensor,
    extend_lens: torch.Tensor | None,
    drafts: int,
) -> None:
    """Write ``extend_lens`` slots, or ``drafts`` of every request, behind its committed tokens."""
    if seq_lens.numel() == 0:
        return
    lengths = torch.full_like(seq_lens, drafts) if extend_lens is None else extend_lens
    request, column, is_used = find_places(lengths, out_cache_loc.numel())
    token = (req_pool_indices[request], seq_lens[request] + column)
    write(req_to_token, token, out_cache_loc, is_used)


def _branch(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    seq_lens: torch.Tensor,
    out_cache_loc: torch.Tensor,
    num_new_pages_per_topk: torch.Tensor,
    last_page_lens_cumsum: torch.Tensor,
    source_cache_loc: torch.Tensor,
    target_cache_loc: torch.Tensor,
    topk: int,
    num_steps: int,
    page_size: int,
) -> None:
    """Read the draft tokens' slots, and the pairs to copy, back from the table."""
    if seq_lens.numel() == 0:
        return
    tails = torch.diff(last_page_lens_cumsum, prepend=last_page_lens_cumsum.new_zeros(1))
    page, branch_len = seq_lens - tails, num_new_pages_per_topk * page_size

    branch = torch.arange(topk, device=seq_lens.device)[:, None]
    step = torch.arange(num_steps, device=seq_lens.device)
    position = seq_lens[:, None, None] + branch * branch_len[:, None, None] + step
    drafts = out_cache_loc.view(-1, topk, num_steps)
    drafts.copy_(read(req_to_token, (req_pool_indices[:, None, None], position), drafts))

    request, column, is_used = find_places(tails * (topk - 1), source_cache_loc.numel())
    tail = tails[request].clamp(min=1)
    first = (req_pool_indices[request], page[request] + column % tail)
    copied = (first[0], first[1] + (1 + column // tail) * branch_len[request])
    source_cache_loc.copy_(read(req_to_token, first, source_cache_loc, is_used))
    target_cache_loc.copy_(read(req_to_token, copied, target_cache_loc, is_used))
