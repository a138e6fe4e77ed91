"""Logits of requests with processors: biases, least lengths and penalties, and log-probabilities.

Dimensions: B requests, W nodes of each, N rows, V vocabulary, C parts of a row, R request
rows, X biased tokens, Y stop tokens.
"""

from __future__ import annotations

from enum import IntFlag
from typing import Annotated, Any

import torch

from graphkit.ops.registration import register_op

PART = 4096
"""Logits that ``log_sums`` has a sum of."""


class Kind(IntFlag):
    """Processors that a request has."""

    PENALTIES = 1
    BIAS = 2
    LEAST_LENGTH = 4
    LOGPROBS = 8
    """Log-probabilities, for which no logit changes."""


CHANGES = Kind.PENALTIES | Kind.BIAS | Kind.LEAST_LENGTH
"""Processors that change logits."""
Processed = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def empty_processed(args: Any) -> Processed:
    """Allocate the results of ``process_logits``."""
    return _empty(args.logits)


def _empty(logits: torch.Tensor) -> Processed:
    rows, vocab = logits.shape
    dtype = torch.float64 if logits.dtype is torch.float64 else torch.float32
    return (
        logits.new_empty(rows, vocab, dtype=dtype),
        logits.new_empty(rows, dtype=torch.bool),
        logits.new_empty(rows, -(-vocab // PART), dtype=torch.float32),
    )


@register_op(fake=empty_processed, sizes_from=("req_pool_indices", "candidates"))
def process_logits(
    logits: Annotated[torch.Tensor, "[N, V >= 1] floating-point"],
    req_pool_indices: Annotated[torch.Tensor, "[B] int64"],
    candidates: Annotated[torch.Tensor, "[B, W >= 1] int64"],
    tree_mask: Annotated[torch.Tensor | None, "[B, W, W] bool"],
    positions: Annotated[torch.Tensor, "[N] int64"],
    kinds: Annotated[torch.Tensor, "[R] int32"],
    token_counts: Annotated[torch.Tensor, "[R, V] int32"],
    penalties: Annotated[torch.Tensor, "[R, 3] float32"],
    bias_ids: Annotated[torch.Tensor, "[R, X >= 1] int32"],
    biases: Annotated[torch.Tensor, "[R, X >= 1] float32"],
    least_lens: Annotated[torch.Tensor, "[R] int32"],
    stop_ids: Annotated[torch.Tensor, "[R, Y >= 1] int64"],
    nodes: Annotated[torch.Tensor | None, "[N] int64"] = None,
) -> Processed:
    """Return the logits of the rows whose requests have processors, and sums of logits.

    The order is that of vLLM, and all numbers are float32, or float64 if ``logits`` are. A logit x
    becomes, step by step:

    1. x + bias of the token.
    2. -inf for a stop token while the text with the next token is shorter than ``least_lens``.
    3. x / repetition if x > 0, else x * repetition, for tokens of prompt, output and path.
    4. x - frequency * n - (presence if n > 0), where n counts the token in output and path.

    The path of a node is the tokens from the root, which the output contains, to the node itself.
    So the logits of a node are those that plain decoding has after the same tokens. Step 3 is that
    of transformers' ``RepetitionPenaltyLogitsProcessor``. Rows of requests without processors are
    neither read nor written. One launch; a row's result does not depend on the others.

    Args:
        logits: The target's, of all nodes, N = B * W, or of those that ``nodes`` names.
        req_pool_indices: Request rows.
        candidates: Token of each node; that of the root is not read.
        tree_mask: True where node i attends to node j, which is i itself or an ancestor; ``None``
            for chains.
        positions: Position of each row in the text of its request.
        kinds: Processors by request row, see ``Kind``.
        token_counts: By request row, twice the occurrences of each token in the output, plus 1 if
            the prompt contains it. Read if the request has penalties.
        penalties: Repetition, presence and frequency penalty by request row.
        bias_ids: Tokens with a bias by request row, each once, padded with -1.
        biases: Their biases.
        least_lens: Tokens of prompt and output before a stop token may follow, by request row.
        stop_ids: Stop tokens by request row, padded with -1.
        nodes: Node ``b * W + i`` of each row, or -1 for a pad. Those of a chain follow each other
            from the root on. ``None`` for all nodes in order.

    Returns:
        The processed logits, [N, V] float32 or float64, undefined in other rows; whether a row was
        processed, [N] bool; and the logarithm of the summed exponentials of each ``PART`` of a
        row's ``logits``, [N, C] float32, defined for requests with ``Kind.LOGPROBS``.
    """
    width, vocab = candidates.shape[1], logits.shape[1]
    processed, is_processed, log_sums = _empty(logits)
    if nodes is None:
        nodes = torch.arange(len(logits), device=logits.device)
    is_processed.zero_()
    for request, kind in enumerate(kinds[req_pool_indices].tolist()):
        if not kind:
            continue
        rows = (nodes // width == request).nonzero()[:, 0]
        is_processed[rows] = bool(kind & CHANGES)
        x = logits[rows].to(processed.dtype)
        if kind & Kind.LOGPROBS:
            behind = log_sums.shape[1] * PART - vocab
            # In float64: torch's logarithm of few float32 numbers differs from that of many.
            parts = torch.nn.functional.pad(x.double(), (0, behind), value=-torch.inf)
            log_sums[rows] = parts.unflatten(1, (-1, PART)).logsumexp(-1).float()
        row = req_pool_indices[request]
        if kind & Kind.BIAS:
            is_id = bias_ids[row] >= 0
            bias = biases[row][is_id].to(x.dtype).expand(len(x), -1)
            x = x.index_add(1, bias_ids[row][is_id], bias)
        if kind & Kind.LEAST_LENGTH:
            ends, stops = positions[rows] + 1 >= least_lens[row], stop_ids[row]
            excluded = x.index_fill(1, stops[stops >= 0], -torch.inf)
            x = torch.where(ends[:, None], x, excluded)
        if kind & Kind.PENALTIES:
            mask = None if tree_mask is None else tree_mask[request]
            on_path = _path_counts(candidates[request], mask, vocab)[nodes[rows] % width]
            x = _penalised(x, token_counts[row], on_path, penalties[row].to(x.dtype))
        processed[rows] = x
    return processed, is_processed, log_sums


def _path_counts(tokens: torch.Tensor, mask: torch.Tensor | None, vocab: int) -> torch.Tensor:
    """Return how often each token is on the path to each node, the root excluded, [W, V] int32."""
    width = len(tokens)
    if mask is None:
        mask = torch.ones(width, width, dtype=torch.bool, device=tokens.device).tril()
    counts = torch.zeros(width, vocab, dtype=torch.int32, device=tokens.device)
    return counts.index_add(1, tokens[1:], mask[:, 1:].int())


def _penalised(
    x: torch.Tensor, counts: torch.Tensor, on_path: torch.Tensor, penalties: torch.Tensor
) -> torch.Tensor:
    """Return logits [W, V] after the penalties."""
    repetition, presence, frequency = penalties
    number = (counts >> 1) + on_path
    scaled = torch.where(x > 0, x / repetition, x * repetition)
    x = torch.where((counts != 0) | (on_path > 0), scaled, x)
    x = x - frequency * number
    return x - torch.where(number > 0, presence, 0)
