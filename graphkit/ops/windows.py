"""Windows over packed token ids.

Suffixes: B requests, T tokens, K topk.
"""

from __future__ import annotations

import torch

from graphkit.ops.slot_arguments import Demands

_ROTATE = Demands(
    "rotate_input_ids",
    input_ids="T!",
    extend_start_loc="B",
    extend_seq_lens="B",
    topk_index="B",
    select_index="B",
)


@torch.library.custom_op(
    "graphkit::rotate_input_ids", mutates_args=("input_ids",), device_types="cpu"
)
def rotate_input_ids(
    input_ids: torch.Tensor,
    extend_start_loc: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    topk_index: torch.Tensor,
    select_index: torch.Tensor,
) -> None:
    """Move each request's window of token ids left by one, then put its new token in.

    The id at the window's last place stays there too, unless ``select_index`` names the place. One
    launch on the current stream; never synchronises, may be captured.

    Args:
        input_ids: Token ids, changed in place.
        extend_start_loc: First place of each request's window. Windows must not overlap; what
            lies outside ``input_ids`` is left out.
        extend_seq_lens: Places in it, 0 or more.
        topk_index: The new token per request, or the best K, of which the first is taken.
        select_index: Place of the new token. One outside the request's own window is left out: a
            pad row's 0 must not touch the first live request.

    Shapes:
        input_ids: [T] contiguous int64. extend_start_loc, extend_seq_lens: [B] int32.
        topk_index: [B] or [B, K] int64. select_index: [B] int64. All may be int32 or int64.

    Raises:
        InputError: A shape, dtype or device does not fit.
    """
    tokens = _first_column(topk_index)
    _ROTATE.check(input_ids, extend_start_loc, extend_seq_lens, tokens, select_index)
    places = input_ids.numel()
    begin = extend_start_loc.clamp(0, places).long()
    end = (extend_start_loc + extend_seq_lens).clamp(0, places).long()
    # Between a window's begin and its last place the running sum is 1: each place there moves.
    steps = torch.zeros(places + 1, dtype=torch.int64, device=input_ids.device)
    ones = torch.ones_like(begin)
    steps.index_add_(0, begin, ones).index_add_(0, torch.maximum(end - 1, begin), -ones)
    moves = steps.cumsum(0)[:-1] > 0
    rotated = torch.where(moves, input_ids.roll(-1), input_ids)

    is_own = (select_index >= begin) & (select_index < end)
    roomy = torch.cat([rotated, rotated.new_zeros(1)])  # a place for what is left out
    roomy[torch.where(is_own, select_index, places)] = tokens.to(input_ids.dtype)
    input_ids.copy_(roomy[:-1])


@rotate_input_ids.register_fake
def _(*_: object) -> None:
    """Nothing is returned, so there is no shape to tell."""


@rotate_input_ids.register_kernel("cuda")
def _(
    input_ids: torch.Tensor,
    extend_start_loc: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    topk_index: torch.Tensor,
    select_index: torch.Tensor,
) -> None:
    from graphkit.ops.kernels.windows import launch_rotate_input_ids

    tokens = _first_column(topk_index)
    _ROTATE.check(input_ids, extend_start_loc, extend_seq_lens, tokens, select_index)
    with torch.cuda.device(input_ids.device):
        launch_rotate_input_ids(input_ids, extend_start_loc, extend_seq_lens, tokens, select_index)


def _first_column(topk_index: torch.Tensor) -> torch.Tensor:
    return topk_index[:, 0] if topk_index.dim() == 2 else topk_index
