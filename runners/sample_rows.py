"""Sample batches: the fields that say where the rows of requests are, for tests and audits.

Suffixes: B requests, W rows per request, X slots or rows per request.
"""

# ruff: noqa: N803, N806 - shape suffixes
from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SampleRows:
    """Requests of a sample batch.

    Attributes:
        rows: Row of each request in the request pool, [B].
        committed: Committed tokens of each request, [B].
        accepted: Accepted tokens of each request, bonus token included, [B].
        slots: KV slot of each position of each row of the request pool, [rows, context].
        parents: Parent of each tree node, an earlier node, [B, W]; ``None`` for chains.
        num_front_tokens: Rows before the drafts that run again.
        width: Rows per request without these; ``None`` selects the mode's.
    """

    rows: Numbers
    committed: Numbers
    accepted: Numbers
    slots: Numbers
    parents: Numbers | None = None
    num_front_tokens: int = 0
    width: int | None = None

    def slots_after(self, count: int) -> Numbers:
        """Return the KV slots of the next positions of each request, [B, count]."""
        place_BX = self.committed[:, None] + np.arange(count)
        slots: Numbers = self.slots[self.rows[:, None], place_BX]
        return slots


def sample_fields(
    sample: SampleRows, width: int, *, ragged: bool, appends: bool
) -> dict[str, NDArray[np.generic]]:
    """Return the fields of a sample batch that say where its rows are.

    Args:
        sample: The requests.
        width: Rows per request, or the most of them.
        ragged: Whether a request has as many rows as accepted tokens.
        appends: Whether ``seq_lens`` leaves out the rows of this step.

    Returns:
        Every such field of any mode, by name. Token ids are not among them.
    """
    width += sample.num_front_tokens
    accepted_B, requests = sample.accepted, len(sample.rows)
    counts_B = accepted_B if ragged else np.full_like(accepted_B, width)
    is_row_BW = np.arange(width) < counts_B[:, None]
    depth_BW = np.tile(np.arange(width), (requests, 1))
    fields: dict[str, NDArray[np.generic]] = {}
    if sample.parents is not None:
        fields["custom_mask"], depth_BW = tree_masks(sample.parents)
    positions = (sample.committed[:, None] + depth_BW)[is_row_BW]
    starts_B = np.arange(requests) * width
    return fields | {
        "req_pool_indices": sample.rows,
        "seq_lens": sample.committed + (0 if appends else counts_B),
        "positions": positions,
        "mrope_positions": np.tile(positions, (3, 1)),
        "out_cache_loc": sample.slots_after(width)[is_row_BW],
        "extend_seq_lens": counts_B,
        "num_accepted_drafts": accepted_B - 1,
        "num_accepted_tokens": accepted_B,
        "select_index": starts_B + sample.num_front_tokens + accepted_B - 1,
    }


def tree_masks(parents_BW: Numbers) -> tuple[NDArray[np.bool_], Numbers]:
    """Return mask [B, W, W] and depth [B, W] of trees. A node sees its ancestors and itself.

    Args:
        parents_BW: Parent of each node, an earlier node. Node 0 is the root.
    """
    requests, width = parents_BW.shape
    mask = np.zeros((requests, width, width), dtype=np.bool_)
    request = np.arange(requests)
    for node in range(width):
        if node:
            mask[:, node] = mask[request, parents_BW[:, node]]
        mask[:, node, node] = True
    return mask, mask.sum(2) - 1
