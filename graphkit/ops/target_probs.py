"""The distribution that a request's tokens are drawn from.

Dimensions: B requests, W rows of each, V vocabulary, R request rows.
"""

from __future__ import annotations

from typing import Annotated

import torch

from graphkit.ops.logits import with_processed
from graphkit.ops.registration import register_op


@register_op(sizes_from=("req_pool_indices",))
def target_probs(
    logits: Annotated[torch.Tensor, "[B * W, V >= 1] floating-point"],
    req_pool_indices: Annotated[torch.Tensor, "[B] int64"],
    temperatures: Annotated[torch.Tensor, "[R] float32"],
    top_ks: Annotated[torch.Tensor, "[R] int32"],
    top_ps: Annotated[torch.Tensor, "[R] float32"],
    min_ps: Annotated[torch.Tensor, "[R] float32"],
    width: Annotated[int, "W >= 1"],
    processed: Annotated[torch.Tensor | None, "[B * W, V] float32 or float64"] = None,
    is_processed: Annotated[torch.Tensor | None, "[B * W] bool"] = None,
) -> Annotated[torch.Tensor, "[B * W, V] float32"]:
    """Return the distribution of each row: softmax over the temperature, then the filters.

    Let w be a token's probability divided by the largest one of its row, in float32. Each filter
    keeps the tokens whose w is at least a bound:

    - ``top_k``: the k-th largest w.
    - ``top_p``: the largest bound for which the kept tokens have the share ``top_p`` of the
      probability that ``top_k`` left.
    - ``min_p``: ``min_p`` itself.

    The kept tokens share all probability in proportion. Tokens of equal w are kept or dropped
    together, so that ``top_k`` may keep more than k tokens. Order and definitions follow
    SGLang with FlashInfer: ``top_k_renorm_prob``, ``top_p_renorm_prob``, then min-p sampling. vLLM
    applies min-p before the others. Sums are rounded: where the share of a bound lies within
    rounding of ``top_p``, devices may choose neighbouring bounds.

    Temperature 0 puts all probability on the most probable token, whatever the filters. A row that
    contains NaN or has no finite largest logit yields NaN. Three launches, none for an idle batch;
    rows without filters do no work for them. A row's result does not depend on the others.

    Args:
        logits: The target's, W rows per request.
        req_pool_indices: Request rows.
        temperatures: Temperatures by request row, 0 or more.
        top_ks: Most tokens to keep by request row; 0 or less keeps all.
        top_ps: Probability to keep by request row; 1 keeps all.
        min_ps: Least w to keep by request row, at most 1; 0 keeps all.
        width: Rows per request (W).
        processed: Replaces some rows of ``logits``, see ``process_logits``.
        is_processed: Which rows.

    Returns:
        The probabilities, [B * W, V] float32.
    """
    logits = with_processed(logits, processed, is_processed)
    rows = req_pool_indices.repeat_interleave(width)[:, None]
    temperature, top_k, top_p, min_p = (
        by_request[rows] for by_request in (temperatures, top_ks, top_ps, min_ps)
    )
    is_greedy = temperature == 0
    # Relative to the largest logit, overflow at low temperatures yields -inf: probability 0.
    behind = logits.float() - logits.amax(-1, keepdim=True).float()
    scaled = behind / torch.where(is_greedy, 1.0, temperature)
    probs = scaled.softmax(-1)
    has_filter = (top_k > 0) | (top_p < 1) | (min_p > 0)
    if has_filter.any():  # sorting takes much longer than all else
        weights = scaled.exp()
        kept = torch.where(weights >= _bounds(weights, top_k, top_p, min_p), weights, 0)
        # A running sum has one order. The order of `sum` may depend on the number of rows.
        probs = torch.where(has_filter, kept / kept.cumsum(-1)[:, -1:], probs)
    greedy = torch.zeros_like(scaled).scatter(1, logits.argmax(-1, keepdim=True), 1.0)
    return torch.where(is_greedy, greedy, probs)


def _bounds(
    weights: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """Return the least weight of each row that all filters keep, [N, 1], from weights [N, V]."""
    falling = weights.sort(-1, descending=True).values
    last = torch.where(top_k > 0, top_k, weights.shape[1]).clamp(max=weights.shape[1]) - 1
    bound = falling.gather(1, last.long())
    running = torch.where(falling >= bound, falling, 0).cumsum(-1, dtype=torch.float64)
    reaches = running >= top_p * running[:, -1:]
    nucleus = falling.gather(1, reaches.int().argmax(-1, keepdim=True))
    bound = torch.where(top_p < 1, torch.maximum(bound, nucleus), bound)
    return torch.maximum(bound, min_p)
