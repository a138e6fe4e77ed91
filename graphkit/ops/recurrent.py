"""Recurrent layers over the nodes of chains and trees: the convolution, the scan and its commit.

One scan serves the gated delta rule (arXiv 2412.06464), Kimi Delta Attention (arXiv 2510.26692),
Mamba (arXiv 2312.00752) and Mamba 2 (arXiv 2405.21060). Each head has a state of K keys and V
values. A row decays it and adds the product of a key and a value, or, with ``beta``, of a key and
what the state lacks of the value. What a node adds is kept instead of the state after it:
``commit_scans`` adds what the accepted path has. For a head of the gated delta rule with 128 keys
and values in float32, that is 1 KB instead of 64.

Dimensions: R request rows, B requests, T rows, N nodes of a request, W most nodes, H heads of
values, G heads of keys, K keys, V values, C channels of a convolution, L factors of each, S columns
of its state, M columns of its inputs, U numbers that a node keeps, E = B + 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import torch

from graphkit.errors import AttentionError
from graphkit.ops.argument_rules import describe
from graphkit.ops.registration import register_op

NO_LIMIT = 3e38
"""Largest time step if there is no limit; an op takes no infinity as a default."""
CHUNK = 64
"""Rows of a prompt that a kernel computes at once, where every head has one decay."""
WHOLE = -2
"""Parent of nodes whose state is kept as a whole, in the second slot of their request row."""


def update_size(heads: int, groups: int, keys: int, values: int, decays: int) -> int:
    """Return how many numbers of a node are kept (U), with so many decays of one head."""
    return groups * keys + heads * (values + decays)


def _check_conv(args: Any) -> None:
    """Refuse states that are not those of the rows."""
    if len(args.states) % (args.width + 1):
        raise AttentionError(
            f"causal_conv: states is {describe(args.states)}, expected slots in multiples of "
            f"{args.width + 1}: the committed state of a row, and those after {args.width} nodes."
        )
    if args.columns is None and args.x.shape[1] != args.states.shape[1]:
        raise AttentionError(
            f"causal_conv: x is {describe(args.x)}, expected {args.states.shape[1]} columns, one "
            "for each channel. Pass columns for others."
        )
    _check_places("causal_conv", args, args.width)


def _check_places(op: str, args: Any, width: int) -> None:
    """Refuse steps with more nodes than are kept, or with another number of rows."""
    if args.begins is None and args.nodes > width:
        raise AttentionError(
            f"{op}: nodes is {args.nodes}, but the states of {width} are kept. Pass begins for "
            "prompts."
        )
    rows = len(args.x if op == "causal_conv" else args.value)
    if args.begins is None and rows != len(args.rows) * args.nodes:
        raise AttentionError(
            f"{op}: {len(args.rows)} requests of {args.nodes} nodes have {rows} rows, expected "
            f"{len(args.rows) * args.nodes}."
        )


@register_op(mutates_args=("states",), check=_check_conv, error=AttentionError, is_costly=True)
def causal_conv(
    states: Annotated[torch.Tensor, "[slots, C, S], contiguous"],
    rows: Annotated[torch.Tensor, "[B] int64"],
    begins: Annotated[torch.Tensor | None, "[E] int64"],
    parents: Annotated[torch.Tensor | None, "[B, N] int64"],
    x: Annotated[torch.Tensor, "[T, M] floating-point"],
    weight: Annotated[torch.Tensor, "[C, L >= 1] floating-point"],
    bias: Annotated[torch.Tensor | None, "[C] floating-point"],
    nodes: Annotated[int, "N >= 0"],
    width: Annotated[int, "W >= 1"],
    silu: bool = False,
    columns: Annotated[torch.Tensor | None, "[C] int64"] = None,
) -> Annotated[torch.Tensor, "[T, C] x.dtype"]:
    """Convolve the inputs of each channel on the path to each node, the node's own last.

    Slot ``row * (W + 1)`` of ``states`` has the last S inputs before the nodes. Those after node n
    are written to slot ``row * (W + 1) + 1 + n``. A step has the same number of nodes for each
    request; with ``begins`` the rows are prompts, of which all W slots get the last state. Rows
    behind the last prompt are pads and give zeros.

    Row-invariant. One launch.

    Args:
        states: The states of one layer.
        rows: Request row of each request; row 0 is that of pads.
        begins: First row of each request's prompt, and the number of rows, B + 1 = E; None for a
            step.
        parents: Parent of each node of a tree, -1 for a root; None for chains. The pads of a tree
            are roots.
        x: The inputs. Rows and columns may be spaced.
        weight: Factors of the inputs, the node's own last (L of them).
        bias: Added to the sums.
        nodes: Nodes of each request, or most rows of a prompt.
        width: Nodes whose states are kept.
        silu: Whether silu of the rounded sums is returned.
        columns: Column of ``x`` for each channel; None for M = C columns in order.

    Returns:
        The convolved rows, [T, C].
    """
    length, taps = states.shape[2], weight.shape[1]
    inputs = x if columns is None else x[:, columns]
    padded, present = _by_request(inputs, rows, begins, nodes)  # [B, N, C]
    count = padded.shape[1]
    before = states[rows * (width + 1)].to(padded.dtype)  # [B, C, S]
    line = torch.cat([before.transpose(1, 2), padded], 1)  # inputs in the order of a chain
    reach = max(taps, length)
    index = torch.arange(count, device=x.device).expand(len(rows), count)
    paths = []
    beyond = torch.zeros_like(index)
    for distance in range(reach):
        if distance:
            above = index - 1 if parents is None else _parents_of(parents, index)
            beyond = torch.where(index < 0, beyond + 1, beyond)
            index = torch.where(index < 0, index, above)
        place = torch.where(index < 0, length - 1 - beyond, length + index)
        values = line.gather(1, place.clamp(min=0)[:, :, None].expand(-1, -1, line.shape[2]))
        paths.append(torch.where((place < 0)[:, :, None], 0.0, values))
    total = torch.zeros(padded.shape, device=x.device)
    for distance in reversed(range(taps)):
        total = total + paths[distance].float() * weight[:, taps - 1 - distance].float()
    if bias is not None:
        total = total + bias.float()
    out = total.to(x.dtype)
    if silu:
        wide = out.float()
        out = (wide / (1.0 + torch.exp(-wide))).to(x.dtype)
    after = torch.stack([paths[distance] for distance in reversed(range(length))], -1)
    after = after.to(states.dtype)  # [B, N, C, S]
    first = rows[:, None] * (width + 1) + 1
    if begins is None:
        states[first + torch.arange(count, device=x.device)] = after
        return out.flatten(0, 1)
    lengths = begins.diff()
    last = after[torch.arange(len(rows), device=x.device), (lengths - 1).clamp(min=0)]
    last = torch.where((lengths == 0)[:, None, None], before.to(states.dtype), last)
    slots = first + torch.arange(width, device=x.device)
    states[slots] = last[:, None].expand(-1, width, -1, -1)
    packed = torch.zeros(x.shape[0], out.shape[2], dtype=out.dtype, device=x.device)
    packed[: int(begins[-1])] = out[present]
    return packed


def _parents_of(parents: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return the parents of nodes, [B, N]; those of the nodes behind the last are not read."""
    return parents.gather(1, index.clamp(min=0))


def _by_request(
    x: torch.Tensor, rows: torch.Tensor, begins: torch.Tensor | None, nodes: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows [T, ...] as [B, N, ...], zeros where there is none, and where there is one."""
    shape = (len(rows), nodes)
    if begins is None:
        return x.reshape(*shape, *x.shape[1:]), torch.ones(shape, dtype=torch.bool, device=x.device)
    present = torch.arange(nodes, device=x.device) < begins.diff()[:, None]
    padded = x.new_zeros(*shape, *x.shape[1:])
    padded[present] = x[: int(begins[-1])]
    return padded, present


def _check_scan(args: Any) -> None:
    """Refuse states, decays and kept numbers whose shapes do not fit each other."""
    (_, heads, *sides), (groups, keys) = args.states.shape, args.key.shape[1:]
    values = args.value.shape[2]
    expected = [values, keys] if args.transposed else [keys, values]
    if args.states.dim() != 4 or sides != expected or heads % groups:
        raise AttentionError(
            f"linear_scan: states is {describe(args.states)}, key is {describe(args.key)} and "
            f"value is {describe(args.value)}, expected states of {expected} for each head, and a "
            "multiple of the heads of keys."
        )
    decays = _decays(args)
    kept = update_size(heads, groups, keys, values, decays)
    if args.updates.shape[2] != kept or len(args.states) != 2 * len(args.updates):
        raise AttentionError(
            f"linear_scan: updates is {describe(args.updates)}, expected {kept} numbers for each "
            f"node, and half as many rows as states has slots ({len(args.states)})."
        )
    is_chosen = args.decay_columns is not None and args.decay.dim() == 2
    if not is_chosen and tuple(args.decay.shape[1:]) != (
        (heads,) if decays == 1 else (heads, decays)
    ):
        raise AttentionError(
            f"linear_scan: decay is {describe(args.decay)}, expected [T, {heads}], or with one for "
            f"each key [T, {heads}, {keys}], or with a weight of three dimensions one for each "
            f"value, [T, {heads}, {values}]."
        )
    if (args.kept_weight is None) != (args.decay_weight is None or args.decay_weight.dim() == 1):
        raise AttentionError(
            "linear_scan: kept_weight is for a decay_weight of three dimensions, and for no other."
        )
    _check_places("linear_scan", args, args.updates.shape[1])


def _decays(args: Any) -> int:
    """Return how many decays a head has: one, one for each key, or one for each value."""
    weight = args.decay_weight
    if weight is not None and weight.dim() == 3:
        return int(args.value.shape[2])
    return 1 if args.decay.dim() == 2 else int(args.key.shape[2])


@register_op(
    mutates_args=("states", "updates", "kept_parents", "kept_weight"),
    check=_check_scan,
    error=AttentionError,
    is_costly=True,
)
def linear_scan(
    states: Annotated[torch.Tensor, "[slots, ...], contiguous"],
    updates: Annotated[torch.Tensor, "[R, W, U] float32, contiguous"],
    kept_parents: Annotated[torch.Tensor, "[R, W] int64, contiguous"],
    kept_weight: Annotated[torch.Tensor | None, "[H, ...] float32, contiguous"],
    rows: Annotated[torch.Tensor, "[B] int64"],
    begins: Annotated[torch.Tensor | None, "[E] int64"],
    parents: Annotated[torch.Tensor | None, "[B, N] int64"],
    order: Annotated[torch.Tensor | None, "[B, N] int64"],
    query: Annotated[torch.Tensor, "[T, G, K] floating-point"],
    key: Annotated[torch.Tensor, "[T, G, K] floating-point"],
    value: Annotated[torch.Tensor, "[T, H, V] floating-point"],
    decay: Annotated[torch.Tensor, "[T, ...] floating-point"],
    beta: Annotated[torch.Tensor | None, "[T, ...] floating-point"],
    nodes: Annotated[int, "N >= 0"],
    scale: float = 1.0,
    normalise: bool = False,
    transposed: bool = False,
    decay_weight: Annotated[torch.Tensor | None, "[H, ...] floating-point"] = None,
    decay_bias: Annotated[torch.Tensor | None, "[H, ...] floating-point"] = None,
    least: float = 0.0,
    most: float = NO_LIMIT,
    skip: Annotated[torch.Tensor | None, "[H, ...] floating-point"] = None,
    gate: Annotated[torch.Tensor | None, "[T, H, V] floating-point"] = None,
    log_weight: bool = False,
    beta_scale: float = 0.0,
    decay_columns: Annotated[torch.Tensor | None, "[H] int64"] = None,
    beta_columns: Annotated[torch.Tensor | None, "[H] int64"] = None,
    starts: Annotated[torch.Tensor | None, "[B] int64"] = None,  # noqa: ARG001 - for the kernel
) -> Annotated[torch.Tensor, "[T, H, V] value.dtype"]:
    """Run a linear recurrence over the nodes of each request, each from the state of its parent.

    For every head, in float32, with ``S`` [K, V] the state after the parent::

        S = exp(decay) * S
        added = beta * (value - S.T @ key)        or value without beta
        S = S + outer(key, added)
        out = S.T @ (scale * query)

    With ``decay_weight``, ``decay`` is a time step before its softplus: ``dt = clamp(softplus(decay
    + decay_bias), least, most)``, and the decay is ``dt * decay_weight``. Without beta the value is
    multiplied with dt. Then ``out`` becomes ``(out + skip * value) * silu(gate)``.

    Slot ``2 * row`` of ``states`` has the state before the nodes, and is not written. Key, added
    value and decay of each node are written to ``updates``, and its parent to ``kept_parents``,
    for ``commit_scans``. With ``begins`` the rows are prompts, which run row after row; the state
    after the last row is written to slot ``2 * row + 1``. Rows behind the last prompt are pads and
    give zeros.

    Row-invariant: a node has the bits that it has in a chain of its ancestors, and in steps of one
    node each. One launch. On CUDA, prompts of bfloat16 and float16 whose heads have one decay run
    in chunks of 64 positions, in two launches. They have the same bits however they are cut at
    multiples of 64, but not those of steps. On a CPU, in float32, and for other decays, prompts
    have the bits of steps.

    Args:
        states: The states of one layer, [2 * R, H, K, V].
        updates: Kept numbers of one layer.
        kept_parents: Kept parents.
        kept_weight: Receives a decay_weight of three dimensions, float32 of its shape; else None.
        rows: Request row of each request; row 0 is that of pads.
        begins: First row of each request's prompt, and the number of rows, B + 1 = E; None for a
            step.
        parents: Parent of each node of a tree, -1 for a root; None for chains.
        order: The nodes of each tree, parents before their children; None for chains.
        query: Reads the states. Rows and heads may be spaced, like those of the next three.
        key: Keys.
        value: Values.
        decay: Logarithms of the decays: [T, H], or one for each key, [T, H, K]; or time steps, [T,
            H], or one for each value, [T, H, V].
        beta: How much of what a state lacks is added, [T, H]; None for the values themselves.
        nodes: Nodes of each request, or most rows of a prompt.
        scale: Factor on the queries.
        normalise: Whether queries and keys are divided by ``sqrt(sum(x ** 2) + 1e-6)``.
        transposed: Whether the states are [2 * R, H, V, K], and the weight [H, V, K].
        decay_weight: Factor of the time steps, float32: [H], or [H, K, V] with one time step for
            each value.
        decay_bias: Added to time steps: [H], or [H, V].
        least: Least time step.
        most: Largest time step.
        skip: Factor on the values that are added to the outputs: [H], or [H, V].
        gate: Gates of the outputs.
        log_weight: Whether a decay_weight [H] is given as its logarithm: the factor is
            ``-exp(decay_weight)``.
        beta_scale: If it is not 0, beta is ``beta_scale * sigmoid(beta)``.
        decay_columns: Column of ``decay``, [T, any], for each head; None for a column per head.
        beta_columns: The same of ``beta``.
        starts: Position of the first row of each prompt in its request; None for multiples of 64.

    Returns:
        The outputs, [T, H, V].
    """
    heads, width = states.shape[1], updates.shape[1]
    if decay_columns is not None:
        decay = decay[:, decay_columns]
    if beta is not None and beta_columns is not None:
        beta = beta[:, beta_columns]
    if beta is not None and beta_scale:
        beta = beta_scale / (1.0 + torch.exp(-beta.float()))
    if decay_weight is not None and log_weight:
        decay_weight = -torch.exp(decay_weight.float())
    tiles = states.transpose(2, 3) if transposed else states  # [slots, H, K, V]
    inputs, log_decay, steps = _widened(
        query, key, value, decay, scale, normalise, decay_weight, decay_bias, least, most, heads,
        beta is None,
    )  # fmt: skip
    wide_query, wide_key, wide_value = inputs
    factor = (beta if beta is not None else value.new_ones(value.shape[:2])).float()
    weight = decay_weight
    if weight is not None and weight.dim() == 3:
        assert kept_weight is not None, "the check requires it"
        kept_weight.copy_(weight)
        weight = weight.transpose(1, 2) if transposed else weight

    def advance(
        state: torch.Tensor, t: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the states after rows [B], what is added to them, and their outputs."""
        state = state * _decay_factor(log_decay[t], weight)
        added = wide_value[t]
        if beta is not None:
            read = (state * wide_key[t][..., None]).sum(-2)
            added = factor[t][..., None] * (added - read)
        state = state + wide_key[t][..., None] * added[..., None, :]
        state = state.to(states.dtype).float()
        return state, added, (state * wide_query[t][..., None]).sum(-2)

    out = torch.zeros(wide_value.shape, device=value.device)
    # The order of a sum depends on the layout in memory.
    initial = tiles[2 * rows].float().contiguous()  # [B, H, K, V]
    requests = torch.arange(len(rows), device=rows.device)
    if begins is not None:
        lengths, state = begins.diff(), initial
        for place in range(nodes):
            chosen = requests[lengths > place]
            if not len(chosen):
                break
            token = begins[chosen] + place
            new, _, out[token] = advance(state[chosen], token)
            state = state.index_copy(0, chosen, new)
        live = rows > 0
        tiles[2 * rows[live] + 1] = state[live].to(states.dtype)
        kept_parents[rows] = WHOLE
    else:
        after = initial.new_zeros(nodes, *initial.shape)
        numbers = torch.arange(nodes, device=rows.device).expand(len(rows), nodes)
        above = numbers - 1 if parents is None else parents
        groups = key.shape[1]
        for place in range(nodes):
            node = numbers[:, place] if order is None else order[:, place]
            parent, token = above[requests, node], requests * nodes + node
            is_root = (parent < 0)[:, None, None, None]
            state = torch.where(is_root, initial, after[parent.clamp(min=0), requests])
            after[node, requests], added, out[token] = advance(state, token)
            kept = [wide_key[token][:, :: heads // groups], added, steps[token]]
            updates[rows, node] = torch.cat([part.flatten(1) for part in kept], 1)
            kept_parents[rows, node] = parent
        assert nodes <= width, "the check requires it"
    if skip is not None:
        out = out + value.float() * skip.float().view(heads, -1)
    if gate is not None:
        wide = gate.float()
        out = out * (wide / (1.0 + torch.exp(-wide)))
    if begins is not None:
        out[int(begins[-1]) :] = 0
    return out.to(value.dtype)


def _widened(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    scale: float,
    normalise: bool,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    least: float,
    most: float,
    heads: int,
    scales_values: bool,
) -> tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor, torch.Tensor]:
    """Return queries, keys and values of all heads in float32, decays, and what is kept of these.

    Decays are [T, H, 1], [T, H, K], or time steps [T, H, V] that a weight has still to multiply.
    """
    both = [query.float(), key.float()]
    if normalise:
        both = [x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in both]
    repeated = [x.repeat_interleave(heads // x.shape[1], 1) for x in both]
    wide = value.float()
    logs = decay.float().view(*value.shape[:2], -1)
    if weight is not None:
        if bias is not None:
            logs = logs + bias.float().view(heads, -1)
        # softplus of torch rounds the last few numbers of a tensor otherwise than those before.
        steps = torch.where(logs > 20.0, logs, torch.log1p(torch.exp(logs))).clamp(least, most)
        wide = wide * steps if scales_values else wide
        logs = steps if weight.dim() == 3 else steps * weight.float()[:, None]
    return (repeated[0] * scale, repeated[1], wide), logs, logs


def _decay_factor(logs: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    """Return what the states are multiplied with, [B, H, K or 1, V or 1]."""
    if weight is not None and weight.dim() == 3:
        return torch.exp(logs[..., None, :] * weight.float())
    return torch.exp(logs)[..., None]


@register_op(mutates_args=("states",), error=AttentionError)
def commit_scans(
    states: Sequence[torch.Tensor],
    updates: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    table: Annotated[torch.Tensor, "[layers, 3] int64"],  # noqa: ARG001 - for the CUDA kernel
    kept_parents: Annotated[torch.Tensor, "[R, W] int64"],
    rows: Annotated[torch.Tensor, "[B] int64"],
    nodes: Annotated[torch.Tensor, "[B] int32 or int64"],
    groups: Annotated[int, "G >= 1"],
    decays: int,
    transposed: bool,
) -> None:
    """Set the states of all layers to those after ``nodes`` of the last ``linear_scan``.

    Each node on the path adds to the state what ``linear_scan`` has kept of it, with the bits that
    the state had there. After a prompt, the state after its last row is copied. Pads, whose row is
    0, keep the state before any token. One launch for any number of layers.

    Args:
        states: States of each layer, [2 * R, H, K, V] of any dtype, contiguous.
        updates: Kept numbers of each layer, [R, W, U] float32.
        weights: Kept weights of each layer, [H, K, V] float32; empty without.
        table: ``scan_table`` of these three.
        kept_parents: Kept parents.
        rows: Request rows; each at most once, except row 0.
        nodes: The last node of each request.
        groups: Heads of keys.
        decays: Decays of a head that ``linear_scan`` has kept.
        transposed: As for ``linear_scan``.
    """
    live = [(row, node) for row, node in zip(rows.tolist(), nodes.tolist(), strict=True) if row]
    outside = [node for _, node in live if not 0 <= node < kept_parents.shape[1]]
    outside += [row for row, _ in live if not 0 <= row < len(kept_parents)]
    if outside:
        raise AttentionError(
            f"commit_scans: a row or node is {outside[0]}, expected rows 0 to "
            f"{len(kept_parents) - 1} and nodes 0 to {kept_parents.shape[1] - 1}."
        )
    for layer, (state, kept) in enumerate(zip(states, updates, strict=True)):
        tiles = state.transpose(2, 3) if transposed else state
        heads, keys, values = tiles.shape[1:]
        weight = weights[layer] if weights else None
        if weight is not None and transposed:
            weight = weight.transpose(1, 2)
        for row, last in live:
            path, node = [], last
            while node >= 0:
                path.append(node)
                node = int(kept_parents[row, node])
            if node == WHOLE:
                tiles[2 * row] = tiles[2 * row + 1]
                continue
            total = tiles[2 * row].float()
            for node in reversed(path):
                sizes = groups * keys, heads * values, heads * decays
                key, added, logs = kept[row, node].split(sizes)
                wide = key.view(groups, keys).repeat_interleave(heads // groups, 0)
                total = total * _decay_factor(logs.view(1, heads, decays), weight)[0]
                total = total + wide[..., None] * added.view(heads, 1, values)
                total = total.to(state.dtype).float()
            tiles[2 * row] = total.to(state.dtype)


def scan_table(
    states: Sequence[torch.Tensor],
    updates: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
) -> torch.Tensor:
    """Describe the tensors of ``commit_scans`` for its kernel, int64 [layers, 3] on their device.

    A row has the addresses of a layer's states, kept numbers and kept weight. Waits for its copy
    to the device: call it once, after allocating the tensors.
    """
    lines = [
        [state.data_ptr(), kept.data_ptr(), weights[layer].data_ptr() if weights else 0]
        for layer, (state, kept) in enumerate(zip(states, updates, strict=True))
    ]
    return torch.tensor(lines, dtype=torch.int64, device=states[0].device)
