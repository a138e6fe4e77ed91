"""Draft tokens of one step, linked to a tree per request, and trees of a fixed shape.

Shape letters: B requests, W nodes per request in TARGET_VERIFY, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch

from graphkit.engine.step.context import EngineContext
from graphkit.graphs import scope
from graphkit.graphs.devices import to_device
from graphkit.ops import build_tree
from graphkit.ops.logits import top_candidates
from graphkit.ops.rows import gather_rows
from graphkit.ops.sampling import target_samples
from graphkit.ops.target_probs import target_probs
from graphkit.spec import SpecConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftTree:
    """Draft tokens of one step, linked to one tree per request.

    Node 0 of each request is the root, which holds the bonus token. The engine sets its token, so
    that a drafter may leave any token id there. The engine also computes all positions: those of a
    chain are consecutive, and those of a tree are ``seq_lens`` plus the depth in ``tree_mask``.

    With ``topk == 1`` the trees are chains: node i follows node i - 1, and ``tree_mask`` is not
    read. In a tree, the mask and the links must describe the same ancestors; the nodes behind the
    root may be in any order. The verifier reads the tensors within the same step; a drafter may
    reuse their memory in its next ``draft``.

    A draft is accepted if it equals the target's own token: its most probable one at temperature 0,
    else its sample for the request's seed and the position. So drafts may be chosen in any way, and
    the text of a request is the same with all drafters.

    A drafter that samples its drafts may pass ``draft_probs``, the distributions that it sampled
    from. Drafts are then accepted by rejection sampling, which accepts more of them. Tokens still
    follow the target's distribution if the drafts were sampled as
    ``ops.rejection.accept_by_rejection`` says, with the numbers of ``EngineContext.draft_samples``.
    But which tokens a seed gives depends on the drafter, the tree and the draft length then. At
    temperature 0 they have no effect.

    Shapes:
        draft_tokens: [B * W] int64.
        tree_mask: [B, W, W] bool; entry [b, i, j] is set if node i attends to node j, which is i
            itself or an ancestor.
        retrieve_next_token: [B, W] int64, first child of each node, -1 if it has none.
        retrieve_next_sibling: [B, W] int64, next child of the same parent, -1 if there is none.
        draft_probs: [B * W, V] float32 or ``None``, the distribution that the children of each node
            were sampled from. Rows of nodes without children do not count.
    """

    draft_tokens: torch.Tensor
    tree_mask: torch.Tensor
    retrieve_next_token: torch.Tensor
    retrieve_next_sibling: torch.Tensor
    draft_probs: torch.Tensor | None = None

    @classmethod
    def from_candidates(
        cls,
        bonus_tokens: torch.Tensor,
        candidates: Mapping[str, torch.Tensor],
        seq_lens: torch.Tensor,
        spec: SpecConfig,
    ) -> DraftTree:
        """Link the selected candidates of each request with ``ops.build_tree``.

        Args:
            bonus_tokens: [B] int64, the roots.
            candidates: ``parent_list``, ``top_scores_index`` and ``draft_tokens``, as in
                ``DraftOutput``.
            seq_lens: [B] int32, committed tokens.
            spec: Gives S, K and W.
        """
        with scope("build"):
            mask, _, _, next_token, next_sibling, tokens = build_tree(
                bonus_tokens,
                candidates["parent_list"],
                candidates["top_scores_index"],
                candidates["draft_tokens"],
                seq_lens,
                spec.num_steps,
                spec.topk,
                spec.num_draft_tokens,
            )
        return cls(
            draft_tokens=tokens,
            tree_mask=mask,
            retrieve_next_token=next_token,
            retrieve_next_sibling=next_sibling,
        )


class ChainTree:
    """A tree of fixed shape: K chains that start at the root, with lengths as equal as W allows.

    Waits for the device when it is created, and never again.

    Args:
        topk: Number of chains (K).
        width: Number of nodes, the root included (W).
        max_batch_size: Most requests of a batch (M).
        device: The device of the tensors.
        drafted: Nodes that drafts can occupy, the root included; the others hold token 0 and are
            linked to none, so that they are never accepted. ``None`` selects all.

    Attributes:
        max_depth: Depth of the longest chain.
    """

    def __init__(
        self,
        topk: int,
        width: int,
        max_batch_size: int,
        device: torch.device,
        *,
        drafted: int | None = None,
    ) -> None:
        linked = width if drafted is None else drafted
        chain = [(node - 1) % topk for node in range(1, width)]
        depth = [(node - 1) // topk + 1 for node in range(1, width)]
        child = [node + topk if node + topk < linked else -1 for node in range(1, width)]
        sibling = [node + 1 if node < min(topk, linked - 1) else -1 for node in range(1, width)]
        self.max_depth = max(depth[: linked - 1], default=0)
        chain_of, depth_of = to_device([0, *chain], device), to_device([0, *depth], device)
        mask = (chain_of[:, None] == chain_of) & (depth_of[:, None] >= depth_of)
        mask[:, 0] = True
        next_token = to_device([1 if linked > 1 else -1, *child], device)
        next_sibling = to_device([-1, *sibling], device)
        self._masks = mask.repeat(max_batch_size, 1, 1)
        self._next_tokens = next_token.repeat(max_batch_size, 1)
        self._next_siblings = next_sibling.repeat(max_batch_size, 1)
        self._undrafted = torch.zeros(max_batch_size, width - linked, dtype=torch.int64).to(device)

    @classmethod
    def one_chain(cls, context: EngineContext, drafted: int) -> Self:
        """Return a single chain per request, as wide as verify; see the class for ``drafted``."""
        width, requests = context.verify_width, context.sizes.max_batch_size
        return cls(1, width, requests, context.device, drafted=drafted)

    def of(self, draft_tokens: torch.Tensor) -> DraftTree:
        """Return the trees of some tokens. Enqueues nothing if drafts can occupy all nodes.

        Args:
            draft_tokens: Token of each node that drafts can occupy, [B, W] int64 if these are all;
                that of the root is not read.
        """
        requests = len(draft_tokens)
        if self._undrafted.shape[1]:
            draft_tokens = torch.cat([draft_tokens, self._undrafted[:requests]], 1)
        return DraftTree(
            draft_tokens=draft_tokens.flatten(),
            tree_mask=self._masks[:requests],
            retrieve_next_token=self._next_tokens[:requests],
            retrieve_next_sibling=self._next_siblings[:requests],
        )


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
