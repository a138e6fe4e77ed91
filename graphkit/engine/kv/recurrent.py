"""Recurrent state of linear-attention and Mamba layers, with a commit of the accepted node.

Suffixes: B requests, N nodes of each request in one batch, T = B * N rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from graphkit.config import is_int, require_int, require_type
from graphkit.engine.kv.contracts import require_device
from graphkit.engine.kv.recurrent_rows import (
    RecurrentInputs,
    ScanRows,
    States,
    StateSlots,
    by_node,
    chosen_states,
    in_order,
    scan_rows,
    state_slots,
)
from graphkit.engine.kv.scanned import ScannedStates, ScanShape
from graphkit.errors import AttentionError, ConfigError, short_repr
from graphkit.ops.inference import allocates
from graphkit.ops.kv_cache import buffer_table, move_kv
from graphkit.ops.recurrent import causal_conv


class RecurrentStatePool:
    """Recurrent states by request row: the committed one, and one after each node of a step.

    A verify step reads the committed state and stores the state after every node, rejected ones
    included. ``commit`` then copies the accepted node's state over the committed one, so that
    rejected tokens leave no trace. Give the pool to ``EngineModel(recurrent_state=...)``, which
    resets, commits and checks it.

    Each buffer has W + 1 slots per request row: slot ``row * (W + 1)`` holds the committed state,
    the W slots behind it those after nodes 0 to W - 1. The row of pad rows, row 0, always starts
    from the initial state, zeros. Buffers keep their addresses for the life of the pool, so
    captured graphs may hold them.

    A layer that runs all nodes of a step in one launch calls ``convolve`` and ``scanned.scan``
    with the ``scan_rows`` of the batch. Of the state of ``recurrence``, the pool keeps what the
    nodes add, and not the states after them.

    Args:
        size: Request rows, as in ``ReqToTokenPool``.
        width: Most nodes per request in one step (W), the width of TARGET_VERIFY.
        layer_num: Recurrent layers.
        device: Device of the buffers.
        shapes: Shape of one state of one layer by kind, such as
            ``{"conv": (dim, kernel - 1), "ssm": (heads, head_dim, state_size)}``.
        dtypes: Dtype of every kind, or one by kind.
        recurrence: The linear recurrence of all layers, whose state is one of the kinds; ``None``
            for states after each node of all kinds.
        runs_at_once: Whether every layer runs all rows of a batch with ``convolve`` and
            ``scanned.scan``. A graph of prompts then serves any lengths.

    Attributes:
        runs_at_once: As passed.
        scanned: States of ``recurrence``; ``None`` without.

    Raises:
        ConfigError: An argument is out of range or has a wrong type, or ``dtypes`` lacks a kind.

    Examples:
        >>> pool = RecurrentStatePool(8, 4, 2, "cpu", shapes={"sum": (16,)})
        >>> pool.state(0, "sum").shape
        torch.Size([45, 16])
    """

    @allocates
    def __init__(
        self,
        size: int,
        width: int,
        layer_num: int,
        device: torch.device | str,
        *,
        shapes: Mapping[str, Sequence[int]],
        dtypes: torch.dtype | Mapping[str, torch.dtype] = torch.float32,
        recurrence: ScanShape | None = None,
        runs_at_once: bool = False,
    ) -> None:
        for field, value in {"size": size, "width": width, "layer_num": layer_num}.items():
            require_int("RecurrentStatePool", field, value)
        dtypes = _checked_dtypes(shapes, dtypes)
        self.size, self.width, self.layer_num = size, width, layer_num
        self.runs_at_once = runs_at_once
        device = require_device("RecurrentStatePool", device)
        slots = (size + 1) * (width + 1)
        self.scanned: ScannedStates | None = None
        if recurrence is not None:
            kind = recurrence.kind
            self.scanned = ScannedStates(size, width, layer_num, device, recurrence, dtypes[kind])
            shapes = {other: shape for other, shape in shapes.items() if other != kind}
        self._layers = [
            {
                kind: torch.zeros(slots, *shape, dtype=dtypes[kind], device=device)
                for kind, shape in shapes.items()
            }
            for _ in range(layer_num)
        ]
        self._buffers = [buffer for buffers in self._layers for buffer in buffers.values()]
        self._table = buffer_table(self._buffers) if self._buffers else None
        self.device = torch.zeros(0, device=device).device  # with its index

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the states of every row by kind and layer, such as ``ssm.0``.

        Declare them as the ``mutable_state`` of a step. They are views of the buffers,
        ``[size + 1, W + 1, *shape]``: the committed state of a row, and those after its nodes.
        Of ``recurrence`` they are the two slots of a row, ``[size + 1, 2, *shape]``, what is kept
        of the nodes, and which nodes are committed.
        """
        named = {
            f"{kind}.{layer}": buffer.unflatten(0, (self.size + 1, self.width + 1))
            for layer, buffers in enumerate(self._layers)
            for kind, buffer in buffers.items()
        }
        return named if self.scanned is None else named | self.scanned.tensors()

    def committed(self) -> dict[str, torch.Tensor]:
        """Return the committed states of every row by kind and layer, ``[size + 1, *shape]``.

        They are views, but copies for ``recurrence``. Call it between a commit and the next step.
        """
        named = {
            f"{kind}.{layer}": buffer[:: self.width + 1]
            for layer, buffers in enumerate(self._layers)
            for kind, buffer in buffers.items()
        }
        return named if self.scanned is None else named | self.scanned.committed()

    def state(self, layer: int, kind: str) -> torch.Tensor:
        """Return the buffer of one kind of state of one layer, ``[(size + 1) * (W + 1), *shape]``.

        Raises:
            AttentionError: There is no such layer or kind.
        """
        buffers = self._of_layer(layer)
        if kind not in list(buffers):  # a list takes unhashable values
            raise AttentionError(
                f"RecurrentStatePool has no state {kind!r} in layer {layer}: it has "
                f"{sorted(self._layers[0])} in layers 0 to {self.layer_num - 1}."
            )
        return buffers[kind]

    def _of_layer(self, layer: int) -> dict[str, torch.Tensor]:
        """Return the buffers of a layer by kind."""
        if not is_int(layer) or not 0 <= layer < self.layer_num:
            raise AttentionError(
                f"RecurrentStatePool has no layer {short_repr(layer)}: it has {self.layer_num}, "
                "counted from 0. Construct the pool with the model's recurrent layers."
            )
        return self._layers[layer]

    def slots(self, inputs: RecurrentInputs) -> StateSlots:
        """Return the slots that a batch reads and writes. Enqueues only; may be captured.

        ``inputs.custom_mask``, bool [B, N, N], gives the parents of a tree; without it each node
        follows the one before. A chain may have more than W nodes, as in a prefill: then only the
        states after its last W nodes have slots. The rows of a prefill are packed, see
        ``StateSlots.packed``.

        Raises:
            AttentionError: Requests have different numbers of rows, or a tree has more than W
                nodes.
        """
        return state_slots(inputs, self.width)

    def scan_rows(self, inputs: RecurrentInputs) -> ScanRows:
        """Return where the rows of a batch are, for ``convolve`` and ``scanned.scan``.

        Enqueues only; may be captured. A chain of more than W nodes is a prompt, after which the
        pool has the state after its last row alone.

        Raises:
            AttentionError: See ``slots``.
        """
        return scan_rows(inputs, self.width)

    def convolve(
        self,
        layer: int,
        kind: str,
        rows: ScanRows,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        silu: bool,
        columns: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run ``graphkit.ops.recurrent.causal_conv`` over inputs, [T, M], and a kind of state."""
        states, nodes = self.state(layer, kind), x if rows.row_of is None else x[rows.row_of]
        out = causal_conv(
            states, rows.rows, rows.begins, rows.parents, nodes, weight, bias, rows.nodes,
            self.width, silu, columns,
        )  # fmt: skip
        return out if rows.node_of is None else out[rows.node_of]

    def load(self, layer: int, slots: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return a copy of the states in ``slots``, int64 [B], by kind, each ``[B, *shape]``.

        Raises:
            AttentionError: There is no such layer.
        """
        return {kind: buffer[slots] for kind, buffer in self._of_layer(layer).items()}

    def store(self, layer: int, slots: torch.Tensor, states: States) -> None:
        """Write states, each ``[B, *shape]``, into ``slots``, int64 [B].

        Raises:
            AttentionError: There is no such layer, or a kind of state is missing.
            ConfigError: ``states`` is no mapping.
        """
        buffers = self._of_layer(layer)
        require_type("RecurrentStatePool", "states", states, Mapping, "tensors by kind of state")
        if missing := buffers.keys() - states.keys():
            raise AttentionError(
                f"RecurrentStatePool stores states of {sorted(buffers)}, got none of "
                f"{sorted(missing)}. Pass one tensor for each kind."
            )
        for kind, buffer in buffers.items():
            buffer[slots] = states[kind].to(buffer.dtype)

    def scan(
        self,
        layer: int,
        slots: StateSlots,
        update: Callable[..., tuple[States, torch.Tensor]],
        *rows: torch.Tensor,
    ) -> torch.Tensor:
        """Run a recurrence over the nodes of each request, parents before their children.

        ``update(states, *node_rows)`` receives the states before one node of each request and that
        node's rows, [B, ...] each. It returns the states after it and the node's output. The
        states after the last W nodes are stored for ``commit``.

        A layer with a kernel for whole chunks may replace ``scan``: it loads ``slots.before`` and
        stores ``slots.after`` of the last W nodes itself; it runs trees in ``slots.order``, and
        packed rows as ``slots.packed`` says.

        Args:
            layer: The recurrent layer, counted from 0.
            slots: ``slots`` of the batch.
            update: The recurrence. Must only enqueue work, since it is captured.
            *rows: Inputs of all rows, [T, ...] each.

        Returns:
            The outputs of all rows, [T, ...].
        """
        nodes = slots.after.shape[1]
        before, after, order = slots.before, slots.after, slots.order
        nodes_of = [by_node(tensor, slots) for tensor in rows]
        if order is not None:
            before, after = before.gather(1, order), after.gather(1, order)
            nodes_of = [in_order(tensor, order) for tensor in nodes_of]
        outputs = []
        states: States = {}
        for node in range(nodes):
            if node == 0 or order is not None:
                states = self.load(layer, before[:, node])
            new, output = update(states, *(tensor[:, node] for tensor in nodes_of))
            states = (
                new if slots.is_row is None else chosen_states(slots.is_row[:, node], new, states)
            )
            if node >= nodes - self.width:
                self.store(layer, after[:, node], states)
            outputs.append(output)
        stacked = torch.stack(outputs, 1)
        if order is not None:
            stacked = in_order(stacked, order.argsort(1))
        flat = stacked.flatten(0, 1)
        return flat if slots.packed is None else flat[slots.packed]

    def reset(self, req_pool_indices: torch.Tensor) -> None:
        """Set the committed states of rows, int64 [B], to the initial state, zeros."""
        if self.scanned is not None:
            self.scanned.reset(req_pool_indices)
        if self._table is not None:
            target = req_pool_indices * (self.width + 1)
            # Slot 0 is the committed state of the pad rows, which nothing writes.
            move_kv(self._buffers, self._table, target, torch.zeros_like(target))

    def commit(self, req_pool_indices: torch.Tensor, nodes: torch.Tensor) -> None:
        """Copy the states after ``nodes`` over the committed ones, in every layer.

        Two launches on the current stream for any number of layers, and one for ``recurrence``,
        which notes the nodes for the next step and moves no state.
        Never synchronises; may be captured. Pad rows, row 0, keep the initial state.

        Args:
            req_pool_indices: [B] int64, request rows; each at most once, except row 0.
            nodes: [B] int64, the last accepted node of each request, 0 to W - 1.

        Raises:
            AttentionError: A tensor has the wrong shape, dtype or device, or, on the CPU, a row or
                node is out of range. On CUDA such a pair copies nothing, or another node's state.
        """
        if self.scanned is not None:
            self.scanned.commit(req_pool_indices, nodes)
        if self._table is not None:
            target, is_live = req_pool_indices * (self.width + 1), req_pool_indices.clamp(max=1)
            source = torch.addcmul(target, is_live, nodes + 1)
            move_kv(self._buffers, self._table, target, source)


def _checked_dtypes(
    shapes: Mapping[str, Sequence[int]], dtypes: torch.dtype | Mapping[str, torch.dtype]
) -> Mapping[str, torch.dtype]:
    """Check the shapes by kind of state, and return their dtypes."""
    owner, expected = (
        "RecurrentStatePool",
        "a mapping such as {'ssm': (heads, head_dim, state_size)}",
    )
    require_type(owner, "shapes", shapes, Mapping, expected)
    if not shapes:
        raise ConfigError(
            f"{owner}.shapes names no kind of state. Pass {expected}.", field="shapes"
        )
    for kind, shape in shapes.items():
        require_type(owner, "shapes", kind, str, "a mapping from names of kinds")
        require_type(owner, f"shapes[{kind!r}]", shape, Sequence, "a sequence of ints")
        for extent in shape:
            require_int(owner, f"shapes[{kind!r}]", extent)
    if isinstance(dtypes, torch.dtype):
        return dict.fromkeys(shapes, dtypes)
    require_type(owner, "dtypes", dtypes, Mapping, "a torch.dtype or a mapping")
    if set(dtypes) != set(shapes):
        raise ConfigError(
            f"{owner}.dtypes is {short_repr(dtypes)}, but shapes has {sorted(shapes)}. Pass one "
            "torch.dtype, or one per kind of state.",
            field="dtypes",
        )
    for kind, dtype in dtypes.items():
        require_type(owner, f"dtypes[{kind!r}]", dtype, torch.dtype, "a torch.dtype")
    return dtypes
