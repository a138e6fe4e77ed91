"""Where the rows of a batch are for recurrent layers, and the rows of each node.

Suffixes: B requests, N nodes of each request in one batch, T = B * N rows, W most nodes of a step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from graphkit.errors import AttentionError
from graphkit.ops.packed import locate
from graphkit.ops.tree import parents_and_depths

States = Mapping[str, torch.Tensor]
"""One tensor per kind of state, ``[B, *shape]``."""


class RecurrentInputs(Protocol):
    """Fields of a mode's inputs that ``RecurrentStatePool`` reads."""

    req_pool_indices: torch.Tensor
    lengths: torch.Tensor | None
    width: int | None
    packs_nodes: bool | None

    @property
    def batch_size(self) -> int:
        """Requests, pads included (B)."""

    @property
    def num_tokens(self) -> int:
        """Rows, pads included (T)."""


@dataclass(frozen=True, slots=True)
class StateSlots:
    """Slots of the states that one batch reads and writes.

    Attributes:
        before: [B, N] int64, slot of the state before each node: the state of its parent, or
            the committed state for a root.
        after: [B, N] int64, slot of the state after each node. Nodes before the last W have none:
            there it is the committed state's and must not be written.
        order: [B, N] int64, an order of each request's nodes in which every node follows its
            parent; ``None`` for chains, whose nodes are in that order.
        packed: Set where requests have different numbers of rows: the place of each row in [B, N],
            int64 [T]. N is the largest number. Places behind the last row of a request have no
            row; a state does not change there, so that the last place has the state after the last
            row. Rows behind the last request are pads, of any place.
        row_of: [B * N] int64, the row of each place, set with ``packed``; any for those without.
        is_row: [B, N] bool, whether a place has a row; set with ``packed``.
    """

    before: torch.Tensor
    after: torch.Tensor
    order: torch.Tensor | None = None
    packed: torch.Tensor | None = None
    row_of: torch.Tensor | None = None
    is_row: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class ScanRows:
    """The rows of one batch, for layers that run them in one launch.

    Attributes:
        rows: Request rows, [B] int64.
        nodes: Nodes of each request; of prompts, most rows.
        begins: First row of each prompt and the number of rows, [B + 1] int64; ``None`` for steps.
        parents: Parent of each node of a tree, -1 for a root, [B, N] int64; ``None`` for chains.
        order: Nodes of each tree, parents before their children, [B, N] int64; ``None`` for chains.
        starts: Position of the first row of each prompt, [B] int64; ``None`` for multiples of 64.
        row_of: Row of each node, [B * N] int64, if the rows of a step are packed. A node without a
            row has another one's, so that what follows it is not to be committed.
        node_of: Node of each row then, [T] int64.
    """

    rows: torch.Tensor
    nodes: int
    begins: torch.Tensor | None = None
    parents: torch.Tensor | None = None
    order: torch.Tensor | None = None
    starts: torch.Tensor | None = None
    row_of: torch.Tensor | None = None
    node_of: torch.Tensor | None = None


def state_slots(inputs: RecurrentInputs, width: int) -> StateSlots:
    """Return the slots that a batch reads and writes, see ``RecurrentStatePool.slots``."""
    if inputs.lengths is not None:
        return _packed_slots(inputs, inputs.lengths, width)
    mask, nodes = _mask_and_nodes(inputs, width)
    committed = inputs.req_pool_indices[:, None] * (width + 1)
    if mask is None:
        return StateSlots(*_chain(committed, nodes, width))
    node = torch.arange(nodes, device=committed.device)
    parents, depths = parents_and_depths(mask[:, :, :nodes])
    order = depths.argsort(dim=1, stable=True)
    return StateSlots(committed + 1 + parents, committed + 1 + node, order)


def scan_rows(inputs: RecurrentInputs, width: int) -> ScanRows:
    """Return where the rows of a batch are, see ``RecurrentStatePool.scan_rows``."""
    rows, lengths = inputs.req_pool_indices, inputs.lengths
    if lengths is not None and inputs.packs_nodes:
        row_of, node_of = _places(lengths, inputs.width or 1, inputs.num_tokens)
        return ScanRows(rows, inputs.width or 1, row_of=row_of, node_of=node_of)
    if lengths is not None:
        begins = torch.nn.functional.pad(lengths.long().cumsum(0), (1, 0))
        return ScanRows(rows, inputs.width or 1, begins)
    mask, nodes = _mask_and_nodes(inputs, width)
    if mask is not None:
        parents, depths = parents_and_depths(mask[:, :, :nodes])
        return ScanRows(rows, nodes, None, parents, depths.argsort(dim=1, stable=True))
    if nodes <= width:
        return ScanRows(rows, nodes)
    return ScanRows(rows, nodes, nodes * torch.arange(len(rows) + 1, device=rows.device))


def _mask_and_nodes(inputs: RecurrentInputs, width: int) -> tuple[torch.Tensor | None, int]:
    """Return the mask of a batch of trees, ``None`` for chains, and its nodes per request."""
    mask: torch.Tensor | None = getattr(inputs, "custom_mask", None)
    requests, rows = inputs.batch_size, inputs.num_tokens
    nodes = rows // requests if requests else 0
    if nodes * requests != rows or (mask is not None and nodes > width):
        limit = "" if mask is None else f" of at most {width} nodes, the pool's width"
        raise AttentionError(
            f"a batch of {requests} requests has {rows} rows: expected the same number of rows "
            f"per request{limit}."
        )
    return mask, nodes


def _chain(committed: torch.Tensor, nodes: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the slots before and after the nodes of chains, from those committed, [B, 1]."""
    node = torch.arange(nodes, device=committed.device) - max(0, nodes - width)
    return committed + node.clamp(min=0), committed + (node + 1).clamp(min=0)


def _packed_slots(inputs: RecurrentInputs, lengths: torch.Tensor, width: int) -> StateSlots:
    """Return the slots of packed rows."""
    nodes, device = inputs.width or 1, lengths.device
    row_of, packed = _places(lengths, nodes, inputs.num_tokens)
    before, after = _chain(inputs.req_pool_indices[:, None] * (width + 1), nodes, width)
    is_row = torch.arange(nodes, device=device) < lengths[:, None]
    return StateSlots(before, after, packed=packed, row_of=row_of, is_row=is_row)


def _places(lengths: torch.Tensor, nodes: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the row of each place of packed rows, [B * N], and the place of each row, [T]."""
    request, node, _ = locate(lengths, rows)
    place = torch.arange(nodes, device=lengths.device)
    begins, last = lengths.cumsum(0) - lengths, (lengths - 1).clamp(min=0)
    row_of = begins[:, None] + torch.minimum(place, last[:, None])
    row_of = row_of.clamp(max=rows - 1).flatten()
    return row_of, request * nodes + node.clamp(max=nodes - 1)


def in_order(rows: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Return rows, [B, N, ...], each request's in the order of indices [B, N]."""
    return rows[torch.arange(len(order), device=order.device)[:, None], order]


def by_node(rows: torch.Tensor, slots: StateSlots) -> torch.Tensor:
    """Return rows, [T, ...], as [B, N, ...]; any row where a place has none."""
    rows = rows if slots.row_of is None else rows[slots.row_of]
    return rows.reshape(*slots.after.shape, *rows.shape[1:])


def chosen_states(chosen: torch.Tensor, new: States, old: States) -> States:
    """Return the new states of the chosen requests, bool [B], and the old ones of the others."""
    return {
        kind: torch.where(chosen.view(-1, *[1] * (new[kind].dim() - 1)), new[kind], state)
        for kind, state in old.items()
    }
