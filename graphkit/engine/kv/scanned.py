"""States of recurrent layers that run all nodes of a step in one launch.

What each node adds to a state is kept instead of the state after it. Per node and layer, in bytes:

==============================  ==================  ===========  ==========
layer                           shape               state        kept
==============================  ==================  ===========  ==========
gated delta rule (Qwen3-Next)   32 x 128 x 128      2,097,152    24,704
Kimi Delta Attention            32 x 128 x 128      2,097,152    49,152
Mamba 2 (2.7B)                  80 x 64 x 128       2,621,440    21,312
Mamba (2.8B)                    5,120 x 16          327,680      41,024
==============================  ==================  ===========  ==========

A commit notes the accepted path, and moves no state. The next step reads the state of each request
once, adds what the path keeps, writes the state into the other slot of the row, and what it keeps
itself. So a step and its commit move twice the bytes of the state, and little more, whatever the
number of nodes. The states of convolutions are kept after each node: those of Qwen3-Next have
65,536 bytes.

Suffixes: B requests, N nodes of each, T rows, W most nodes, H heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from graphkit.engine.kv.recurrent_rows import ScanRows
from graphkit.ops.inference import allocates
from graphkit.ops.kv_cache import buffer_table, move_kv
from graphkit.ops.recurrent import commit_scans, linear_scan, update_size


@dataclass(frozen=True, slots=True)
class ScanShape:
    """The linear recurrence of a layer, see ``graphkit.ops.recurrent.linear_scan``.

    Attributes:
        kind: Name of the state.
        heads: Heads of values (H).
        groups: Heads of keys (G).
        keys: Elements of a key (K).
        values: Elements of a value (V).
        decays: Decays of a head: 1, one for each key, or one for each value.
        transposed: Whether a state is [H, V, K].
        has_weight: Whether the decays of values are multiplied with a weight.
    """

    kind: str
    heads: int
    groups: int
    keys: int
    values: int
    decays: int = 1
    transposed: bool = False
    has_weight: bool = False

    @property
    def state(self) -> tuple[int, ...]:
        """Shape of the state of one request."""
        sides = (self.values, self.keys) if self.transposed else (self.keys, self.values)
        return self.heads, *sides

    @property
    def update(self) -> int:
        """Numbers that are kept of each node."""
        return update_size(self.heads, self.groups, self.keys, self.values, self.decays)


class ScannedStates:
    """States of one linear recurrence in all layers, and what the nodes of a step add to them.

    Each request row has two slots: the current one, whose state and kept numbers a step reads, and
    the one that it writes, see ``linear_scan``. Buffers keep their addresses, so captured graphs
    may hold them.

    Args:
        size: Request rows.
        width: Most nodes per request in one step (W).
        layer_num: Layers.
        device: Device of the buffers.
        shape: The recurrence.
        dtype: Data type of the states.
    """

    @allocates
    def __init__(
        self,
        size: int,
        width: int,
        layer_num: int,
        device: torch.device | str,
        shape: ScanShape,
        dtype: torch.dtype,
    ) -> None:
        self.shape = shape
        layers, rows = range(layer_num), size + 1
        single = {"dtype": torch.float32, "device": device}
        self.states = [
            torch.zeros(2 * rows, *shape.state, dtype=dtype, device=device) for _ in layers
        ]
        self._updates = [torch.zeros(rows, 2, width, shape.update, **single) for _ in layers]  # type: ignore[call-overload]
        weights = layers if shape.has_weight else ()
        self._weights = [torch.zeros(*shape.state, **single) for _ in weights]  # type: ignore[call-overload]
        numbers = {"dtype": torch.int64, "device": device}
        self._parents = torch.full((rows, 2, width), -1, **numbers)  # type: ignore[call-overload]
        self._pending = torch.zeros(rows, width + 2, **numbers)  # type: ignore[call-overload]
        self._copies = buffer_table(self.states)

    def committed(self) -> dict[str, torch.Tensor]:
        """Return a copy of the committed state of each row, [rows, ...], by kind and layer.

        An empty prompt of every row writes it into the slot that the next step writes anyway.
        """
        shape, device = self.shape, self._pending.device
        rows = torch.arange(len(self._pending), device=device)
        # Row 0 is that of pads, whose slot nothing writes.
        empty = ScanRows(rows, 0, torch.zeros(len(rows) + 1, dtype=torch.int64, device=device))
        key, value, decay = (
            torch.zeros(0, *sizes, device=device)
            for sizes in (
                (shape.groups, shape.keys),
                (shape.heads, shape.values),
                (shape.heads, shape.decays)[: 1 + (shape.decays > 1)],
            )
        )
        other = 2 * rows + 1 - self._pending[:, 0]
        named = {}
        for n, state in enumerate(self.states):
            weight = self._weights[n] if self._weights else None
            self.scan(n, empty, key, key, value, decay, None, decay_weight=weight)
            named[f"{shape.kind}.{n}"] = state[other]
        return named

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return every buffer by name, [rows, ...]: a row's two states, and what nodes add."""
        kind = self.shape.kind
        named = {f"{kind}.{n}": state.unflatten(0, (-1, 2)) for n, state in enumerate(self.states)}
        named |= {f"{kind}.{n} updates": kept for n, kept in enumerate(self._updates)}
        named |= {f"{kind}.{n} weight": weight for n, weight in enumerate(self._weights)}
        return {**named, f"{kind} parents": self._parents, f"{kind} pending": self._pending}

    def scan(
        self,
        layer: int,
        rows: ScanRows,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        decay: torch.Tensor,
        beta: torch.Tensor | None,
        gate: torch.Tensor | None = None,
        **options: Any,
    ) -> torch.Tensor:
        """Run the recurrence of a layer over the rows of a batch; enqueues only.

        The other arguments, and the outputs, [T, H, V], are those of ``linear_scan``.
        """
        weight = self._weights[layer] if self._weights else None
        if (row_of := rows.row_of) is not None:
            query, key, value, decay = (each[row_of] for each in (query, key, value, decay))
            beta = None if beta is None else beta[row_of]
            gate = None if gate is None else gate[row_of]
        out = linear_scan(
            self.states[layer], self._updates[layer], self._parents, self._pending, weight,
            rows.rows, rows.begins, rows.parents, rows.order, query, key, value, decay, beta,
            rows.nodes, gate=gate, transposed=self.shape.transposed, starts=rows.starts, **options,
        )  # fmt: skip
        return out if rows.node_of is None else out[rows.node_of]

    def reset(self, rows: torch.Tensor) -> None:
        """Set the committed states of rows, int64 [B], to zeros, those of the pad row."""
        move_kv(self.states, self._copies, 2 * rows, torch.zeros_like(rows))
        self._pending.index_fill_(0, rows, 0)

    def commit(self, rows: torch.Tensor, nodes: torch.Tensor) -> None:
        """Let the next step begin with the states after a node of each request, or a prompt."""
        commit_scans(self._pending, self._parents, rows, nodes)
