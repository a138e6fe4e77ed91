"""Where the rows of drawn requests are: lengths, positions, slots, counts and trees.

Suffixes: B requests, W most rows of a request.
"""

# ruff: noqa: N803, N806 - tensor suffixes are the house's notation
from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from graphkit.attention.query_rows import APPENDING
from graphkit.buffers import Capacity
from graphkit.spec import ForwardMode

Numbers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Step:
    """What a mode does with each request.

    Attributes:
        mode: The mode.
        capacity: Its runner's.
        slots: Slot of each position of each row of the request pool.
        front: Rows before those of the drafts that are run again.
    """

    mode: ForwardMode
    capacity: Capacity
    slots: Numbers
    front: int = 0

    @property
    def ahead(self) -> int:
        """Slots that a request needs behind its committed tokens."""
        steps = self.capacity.letters["S"] if self.mode is ForwardMode.DRAFT else 1
        return self.capacity.tokens_per_request * steps

    @property
    def most_accepted(self) -> int:
        """Most accepted tokens of a request, bonus included."""
        return min(self.capacity.letters["S"] + 1, self.capacity.tokens_per_request - self.front)

    def fields(
        self, rows_B: Numbers, committed_B: Numbers, accepted_B: Numbers, parents_BW: Numbers | None
    ) -> dict[str, NDArray[np.generic]]:
        """Every field of any mode that says where rows are.

        Args:
            rows_B: Rows of the request pool.
            committed_B: Committed tokens.
            accepted_B: Accepted tokens, bonus included.
            parents_BW: The node that each node of a tree hangs on, an earlier one; ``None`` for
                chains.
        """
        width = self.capacity.tokens_per_request
        counts_B = accepted_B if self.capacity.ragged else np.full_like(accepted_B, width)
        place_BX = committed_B[:, None] + np.arange(self.ahead)
        slot_BX, is_row_BX = self.slots[rows_B[:, None], place_BX], np.ones_like(place_BX, bool)
        if self.capacity.ragged:
            is_row_BX = np.arange(width) < counts_B[:, None]
        depth_BW = np.tile(np.arange(width), (len(rows_B), 1))
        fields: dict[str, NDArray[np.generic]] = {}
        if self.mode is ForwardMode.DRAFT:
            depth_BW[:] = 0
        if parents_BW is not None:
            fields["custom_mask"], depth_BW = trees(parents_BW)
        is_row_BW = is_row_BX[:, :width]
        positions = (committed_B[:, None] + depth_BW)[is_row_BW]
        appended = 0 if self.mode in APPENDING else counts_B
        return fields | {
            "req_pool_indices": rows_B,
            "seq_lens": committed_B + appended,
            "positions": positions,
            "mrope_positions": np.tile(positions, (3, 1)),
            "out_cache_loc": slot_BX[is_row_BX],
            "extend_seq_lens": counts_B,
            "num_accepted_drafts": accepted_B - 1,
            "num_accepted_tokens": accepted_B,
            "select_index": np.arange(len(rows_B)) * width + self.front + accepted_B - 1,
        }


def trees(parents_BW: Numbers) -> tuple[NDArray[np.bool_], Numbers]:
    """Which nodes each node sees, bool [B, W, W], and its depth, [B, W]: itself and ancestors."""
    requests, width = parents_BW.shape
    mask = np.zeros((requests, width, width), dtype=np.bool_)
    each = np.arange(requests)
    for node in range(width):
        if node:
            mask[:, node] = mask[each, parents_BW[:, node]]
        mask[:, node, node] = True
    return mask, mask.sum(2) - 1


def slots_in_rows(rows: int, context: int, page_size: int) -> Numbers:
    """A table of slots, [rows + 1, context]: whole pages for each row; row 0 stays 0."""
    pages = -(-context // page_size)
    first = page_size * (1 + pages * np.arange(-1, rows))
    table = first[:, None] + np.arange(context)
    table[0] = 0
    return table
