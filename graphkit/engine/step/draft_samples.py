"""Drafts of a language model that are its own samples, or at temperature 0 its best tokens."""

from __future__ import annotations

import torch

from graphkit.engine.step.context import EngineContext
from graphkit.ops.logits import top_candidates
from graphkit.ops.rows import gather_rows
from graphkit.ops.sampling import target_samples
from graphkit.ops.target_probs import target_probs


class DraftSamples:
    """Chooses drafts as the target chooses its tokens.

    The target's token after a position is its sample for the request's seed and that position. The
    sample of the draft model takes the same seed, position and sampling parameters, so that models
    of equal logits draw equal tokens. At temperature 0 it is the most probable token.

    In a tree the first candidates on the first branch have probability 1, so that the path of all
    samples is verified. A sample is the first candidate of its row, with probability 1, and the
    most probable tokens follow it.

    Args:
        context: The engine's; its ``spec`` has the draft length.
    """

    def __init__(self, context: EngineContext) -> None:
        self._state, self._topk = context.state, context.spec.topk

    def __call__(
        self, logits: torch.Tensor, req_pool_indices: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Return the candidates after some rows, the same number for each request.

        Args:
            logits: The draft model's, [N, V].
            req_pool_indices: Request rows, [B] int64.
            positions: Position of each row, [N] int64.

        Returns:
            Probabilities, [N, K] float32, or ``None`` for chains, and token ids, [N, K] int64.
        """
        rows, state = req_pool_indices, self._state
        width = max(len(logits) // max(len(rows), 1), 1)
        temperatures = state.temperatures
        probs = target_probs(
            logits, rows, temperatures, state.top_ks, state.top_ps, state.min_ps, width
        )
        samples = target_samples(probs, rows, state.seeds, positions.view(-1, width))[:, None]
        if self._topk == 1:
            return None, samples
        probs, tokens = top_candidates(logits, self._topk)
        # Candidates before the sample move back by one. Without it, all do, and the last is lost.
        # At temperature 0 the sample is the first candidate, so that none moves.
        stays = (tokens == samples).cumsum(1)[:, :-1].bool()
        is_greedy = (gather_rows(temperatures, rows) == 0)[:, None].expand(-1, width)
        first = torch.where(is_greedy.reshape(-1, 1), probs[:, :1], 1.0)
        probs = torch.where(stays, probs[:, 1:], probs[:, :-1])
        tokens = torch.where(stays, tokens[:, 1:], tokens[:, :-1])
        probs, tokens = torch.cat([first, probs], 1), torch.cat([samples, tokens], 1)
        return _with_certain_path(probs, width), tokens

    def most_probable(
        self, logits: torch.Tensor, req_pool_indices: torch.Tensor, _positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the candidates in a tree after rows of requests at temperature 0.

        Arguments and results are those of a call.
        """
        probs, tokens = top_candidates(logits, self._topk)
        width = max(len(logits) // max(len(req_pool_indices), 1), 1)
        return _with_certain_path(probs, width), tokens


def _with_certain_path(probs: torch.Tensor, width: int) -> torch.Tensor:
    """Set the probability of the first candidate on the first branch of each request, in place."""
    probs[::width, 0] = 1
    return probs
