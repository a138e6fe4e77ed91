"""A target whose text is known in advance, and a drafter that errs: a whole step of few kernels.

The token after ``t`` at position ``p`` is entry [p % PERIOD, t] of a table whose rows are
permutations. Two requests therefore never come to the same text by chance, and a token that is
lost, repeated or taken from another request changes all later ones. There is no KV.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

import graphkit as gk

VOCAB, PERIOD, STEPS, CONTEXT = 64, 97, 3, 64
_CERTAIN = 1000.0
"""Logit of the next token; the others are 0, so that sampling draws it at any temperature."""


class Table:
    """The table, and texts by it.

    Args:
        device: Device of ``next_tokens``.

    Attributes:
        next_tokens: [PERIOD, VOCAB] int64.
    """

    def __init__(self, device: torch.device) -> None:
        random = torch.Generator().manual_seed(0)
        rows = torch.stack([torch.randperm(VOCAB, generator=random) for _ in range(PERIOD)])
        self._rows: list[list[int]] = rows.tolist()
        self.next_tokens = rows.to(device)

    def text(self, prompt: Sequence[int], limit: int, stops: Collection[int]) -> list[int]:
        """Return the tokens after a prompt, up to ``limit`` or the first stop token."""
        text, last = [], prompt[-1]
        for position in range(len(prompt) - 1, len(prompt) - 1 + limit):
            last = self._rows[position % PERIOD][last]
            text.append(last)
            if last in stops:
                break
        return text


def _nothing(inputs: gk.TargetVerifyInputs) -> None:
    """Do nothing."""


class TableForward:
    """The target's forward: three kernels.

    Args:
        table: The table.
        before: Called with the inputs before each forward.
    """

    def __init__(
        self, table: Table, before: Callable[[gk.TargetVerifyInputs], None] = _nothing
    ) -> None:
        self._next, self._before = table.next_tokens, before
        self._logits = _CERTAIN * torch.eye(VOCAB, device=table.next_tokens.device)

    def __call__(self, inputs: gk.TargetVerifyInputs) -> gk.ForwardOutput:
        """Return the logits of the token after each row."""
        self._before(inputs)
        following = self._next[inputs.positions % PERIOD, inputs.input_ids]
        return gk.ForwardOutput(next_token_logits=self._logits[following])


class ErringDrafter(gk.Drafter):
    """Drafts the table's tokens with errors, in chains or with two candidates per depth.

    In a tree, the table's token is now the first and now the second candidate of its depth, or
    neither, so that accepted paths end at every node.

    Args:
        table: The target's.
        topk: 1 or 2.

    Attributes:
        topk: As passed.
    """

    def __init__(self, table: Table, topk: int) -> None:
        self._next, self.topk = table.next_tokens, topk
        device = self._next.device
        following, ahead = torch.arange(VOCAB, device=device).expand(PERIOD, -1), []
        for depth in range(STEPS):
            following = self._next.roll(-depth, 0).gather(1, following)
            ahead.append(following)
        self._ahead = torch.stack(ahead, 2)  # [PERIOD, VOCAB, STEPS]
        self._depth = torch.arange(STEPS, device=device)
        width = self.width
        # Node 1 + topk * d continues the path; in a tree its sibling is a leaf.
        children = [1, *([-1] * (width - 1))]
        siblings, mask = [-1] * width, torch.eye(width, dtype=torch.bool)
        mask[:, 0] = True
        for node in range(1, width, topk):
            children[node] = node + topk if node + topk < width else -1
            mask[node : node + topk] |= mask[node - topk] if node > topk else mask[0]
            if topk > 1:
                siblings[node] = node + 1
        self._links = torch.tensor([children, siblings], device=device)
        self._mask = mask.to(device)

    @property
    def width(self) -> int:
        """Nodes of each request."""
        return 1 + STEPS * self.topk

    @property
    def max_path(self) -> int:
        """All depths, and the bonus token."""
        return STEPS + 1

    def prepare(self, context: gk.EngineContext) -> None:
        """Do nothing."""

    def draft(
        self,
        req_pool_indices: torch.Tensor,  # noqa: ARG002
        seq_lens: torch.Tensor,
        bonus_tokens: torch.Tensor,
    ) -> gk.DraftTree:
        """See ``Drafter.draft``."""
        requests = len(seq_lens)
        right = self._ahead[seq_lens % PERIOD, bonus_tokens]
        wrong = (right + 1) % VOCAB
        kind = (3 * (seq_lens[:, None] + self._depth) + 5 * bonus_tokens[:, None]) % 7
        candidates = [torch.where(kind < 4, right, wrong)]
        if self.topk > 1:
            second = torch.where(kind < 6, right, (wrong + 1) % VOCAB)
            candidates.append(torch.where(kind < 4, wrong, second))
        drafts = torch.stack(candidates, 2).flatten(1)
        children, siblings = self._links.unbind()
        return gk.DraftTree(
            draft_tokens=torch.cat([bonus_tokens[:, None], drafts], 1).flatten(),
            tree_mask=self._mask.expand(requests, -1, -1),
            retrieve_next_token=children.expand(requests, -1).contiguous(),
            retrieve_next_sibling=siblings.expand(requests, -1).contiguous(),
        )

    def extend(self, verified: gk.Verified) -> None:
        """Do nothing: the table has no state."""


def table_runner(
    table: Table,
    topk: int,
    *,
    rows: int,
    batch_sizes: Sequence[int],
    ring_entries: int,
    drafter_type: type[ErringDrafter] = ErringDrafter,
) -> gk.SpecStepRunner:
    """Create a runner of the table's step; each row has its own KV slots."""
    model, settings = _step_of(table, drafter_type(table, topk), rows, max(batch_sizes))
    slots = torch.arange(1, 1 + rows * CONTEXT, dtype=torch.int32, device=settings["device"])
    model.attention.req_to_token_pool.req_to_token[1:] = slots.view(rows, -1)
    return gk.SpecStepRunner(
        model,
        batch_sizes=batch_sizes,
        chunked_prefill_size=4,
        ring_entries=ring_entries,
        **settings,
    )


def table_engine(
    table: Table,
    topk: int,
    *,
    max_batch_size: int,
    slots: int | None = None,
    before: Callable[[gk.TargetVerifyInputs], None] = _nothing,
    **options: Any,
) -> gk.SpeculativeEngine:
    """Create an engine of the table's step.

    Args:
        table: The target's.
        topk: 1 or 2.
        max_batch_size: Most requests that run at once.
        slots: KV slots; ``None`` has room for every request.
        before: As for ``TableForward``.
        **options: Further arguments of ``SpeculativeEngine``.
    """
    drafter = ErringDrafter(table, topk)
    model, settings = _step_of(table, drafter, max_batch_size, max_batch_size, slots, before)
    return gk.SpeculativeEngine(model, **settings, **options)


def _step_of(
    table: Table,
    drafter: ErringDrafter,
    rows: int,
    max_batch_size: int,
    slots: int | None = None,
    before: Callable[[gk.TargetVerifyInputs], None] = _nothing,
) -> tuple[gk.EngineModel, dict[str, Any]]:
    """Return the target over a pool with KV slots for ``rows`` requests, and what else it needs."""
    device = table.next_tokens.device
    requests = gk.ReqToTokenPool(rows, CONTEXT, device)
    pool = gk.MHATokenToKVPool(slots or rows * CONTEXT, 1, torch.float32, 1, 1, 0, device)
    return gk.EngineModel(TableForward(table, before), gk.SdpaAttention(requests, pool)), {
        "drafter": drafter,
        "spec": gk.SpecConfig("NGRAM", STEPS, drafter.topk, drafter.width),
        "sizes": gk.BufferSizes(max_batch_size, CONTEXT, 1, VOCAB, torch.float32),
        "device": device,
    }
