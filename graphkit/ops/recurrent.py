"""Recurrent layers over the nodes of chains and trees: the convolution, the scan and its commit.

One scan serves the gated delta rule (arXiv 2412.06464), Kimi Delta Attention (arXiv 2510.26692),
Mamba (arXiv 2312.00752) and Mamba 2 (arXiv 2405.21060). Each head has a state of K keys and V
values. A row decays it and adds the product of a key and a value, or, with ``beta``, of a key and
what the state lacks of the value. What a node adds is kept instead of the state after it, and the
next scan adds what the accepted path has, which ``commit_scans`` notes. For a head of the gated
delta rule with 128 keys and values in float32, that is 1 KB instead of 64.

Dimensions: R request rows, B requests, T rows, N nodes of a request, W most nodes, H heads of
values, G heads of keys, K keys, V values, C channels of a convolution, L factors of each, S columns
of its state, M columns of its inputs, U numbers that a node keeps, P = W + 2, E = B + 1.
"""

from __future__ import annotations

from typing import Annotated, Any

import torch
from torch.nn import functional

from graphkit.errors import AttentionError
from graphkit.ops.argument_rules import describe
from graphkit.ops.decoder import in_vectors
from graphkit.ops.registration import register_op

NO_LIMIT = 3e38
"""Largest time step if there is no limit; an op takes no infinity as a default."""
CHUNK = 64
"""Rows of a prompt that a kernel computes at once, where every head has one decay."""
WHOLE = -2
"""Parent of nodes whose state is kept as a whole, in a slot of their request row."""


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
        out = in_vectors(functional.silu, out)
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
    if args.updates.shape[3] != kept or len(args.states) != 2 * len(args.updates):
        raise AttentionError(
            f"linear_scan: updates is {describe(args.updates)}, expected {kept} numbers for each "
            f"node, and half as many rows as states has slots ({len(args.states)})."
        )
    if args.pending.shape[1] != args.updates.shape[2] + 2:
        raise AttentionError(
            f"linear_scan: pending is {describe(args.pending)}, expected "
            f"{args.updates.shape[2] + 2} columns: a slot, a number of nodes, and the nodes."
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
    _check_places("linear_scan", args, args.updates.shape[2])


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
    updates: Annotated[torch.Tensor, "[R, 2, W, U] float32, contiguous"],
    kept_parents: Annotated[torch.Tensor, "[R, 2, W] int64, contiguous"],
    pending: Annotated[torch.Tensor, "[R, P] int64, contiguous"],
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

    A request row has two slots, and ``pending`` tells which one is current (s). The state before
    the nodes is that of slot ``2 * row + s`` of ``states``, to which the nodes of ``pending`` are
    added, as ``updates[row, s]`` keeps them: with the bits that the state had there. It is written
    to the other slot. There go key, added value and decay of each node, ``updates[row, 1 - s]``,
    and its parent, ``kept_parents[row, 1 - s]``. What is current is not written: a scan may run
    again. After ``commit_scans``, the other slot is the current one.

    With ``begins`` the rows are prompts, which run row after row; the state after the last row is
    written to the other slot. Rows behind the last prompt are pads and give zeros.

    Row-invariant: a node has the bits that it has in a chain of its ancestors, and in steps of one
    node each. One launch. On CUDA, prompts of bfloat16 and float16 whose heads have one decay run
    in chunks of 64 positions, in two launches. They have the same bits however they are cut at
    multiples of 64, but not those of steps. On a CPU, in float32, and for other decays, prompts
    have the bits of steps.

    Args:
        states: The states of one layer, [2 * R, H, K, V].
        updates: Kept numbers of one layer.
        kept_parents: Kept parents, of all layers.
        pending: What ``commit_scans`` has noted, for all layers; zeros before any commit.
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
    heads, width = states.shape[1], updates.shape[2]
    if decay_columns is not None:
        decay = decay[:, decay_columns]
    if beta is not None and beta_columns is not None:
        beta = beta[:, beta_columns]
    if beta is not None and beta_scale:
        beta = beta_scale / (1.0 + torch.exp(-beta.float()))
    if decay_weight is not None and log_weight:
        decay_weight = -torch.exp(decay_weight.float())
    tiles = states.transpose(2, 3) if transposed else states  # [slots, H, K, V]
    wide_query, wide_key, wide_value, log_decay = _widened(
        query, key, value, decay, scale, normalise, decay_weight, decay_bias, least, most, heads,
        beta is None,
    )  # fmt: skip
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
    groups, other = key.shape[1], 1 - pending[rows, 0]
    initial = _current_states(tiles, updates, weight, pending, rows, groups)
    requests, live = torch.arange(len(rows), device=rows.device), rows > 0
    if begins is not None:
        lengths, state = begins.diff(), initial
        for place in range(nodes):
            chosen = requests[lengths > place]
            if not len(chosen):
                break
            token = begins[chosen] + place
            new, _, out[token] = advance(state[chosen], token)
            state = state.index_copy(0, chosen, new)
        tiles[(2 * rows + other)[live]] = state[live].to(states.dtype)
        kept_parents[rows, other] = WHOLE
    else:
        after = initial.new_zeros(nodes, *initial.shape)
        numbers = torch.arange(nodes, device=rows.device).expand(len(rows), nodes)
        above = numbers - 1 if parents is None else parents
        tiles[(2 * rows + other)[live]] = initial[live].to(states.dtype)
        for place in range(nodes):
            node = numbers[:, place] if order is None else order[:, place]
            parent, token = above[requests, node], requests * nodes + node
            is_root = (parent < 0)[:, None, None, None]
            state = torch.where(is_root, initial, after[parent.clamp(min=0), requests])
            after[node, requests], added, out[token] = advance(state, token)
            kept = [wide_key[token][:, :: heads // groups], added, log_decay[token]]
            updates[rows, other, node] = torch.cat([part.flatten(1) for part in kept], 1)
            kept_parents[rows, other, node] = parent
        assert nodes <= width, "the check requires it"
    if skip is not None:
        out = out + value.float() * skip.float().view(heads, -1)
    if gate is not None:
        out = out * in_vectors(functional.silu, gate.float())
    if begins is not None:
        out[int(begins[-1]) :] = 0
    return out.to(value.dtype)


def _current_states(
    tiles: torch.Tensor,
    updates: torch.Tensor,
    weight: torch.Tensor | None,
    pending: torch.Tensor,
    rows: torch.Tensor,
    groups: int,
) -> torch.Tensor:
    """Return the states before the nodes of a batch, [B, H, K, V] in float32."""
    heads, keys, values = tiles.shape[1:]
    states = tiles[2 * rows + pending[rows, 0]].float()
    for state, (slot, depth, *path), row in zip(
        states, pending[rows].tolist(), rows.tolist(), strict=True
    ):
        for node in path[:depth]:
            key, added, logs = updates[row, slot, node].split(
                [groups * keys, heads * values, updates.shape[3] - groups * keys - heads * values]
            )
            wide = key.view(groups, keys).repeat_interleave(heads // groups, 0)
            total = state * _decay_factor(logs.view(1, heads, -1), weight)[0]
            total = total + wide[..., None] * added.view(heads, 1, values)
            state.copy_(total.to(tiles.dtype))
    return states.contiguous()  # the order of a sum depends on the layout in memory


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
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return queries, keys and values of all heads in float32, and decays as they are kept.

    Decays are [T, H, 1], [T, H, K], or time steps [T, H, V] that a weight has still to multiply.
    """
    both = [query.float(), key.float()]
    if normalise:
        both = [x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in both]
    repeated = [x.repeat_interleave(heads // x.shape[1], 1) for x in both]
    wide = value.float()
    logs = decay.float()
    logs = logs[..., None] if logs.dim() == 2 else logs
    if weight is not None:
        if bias is not None:
            logs = logs + bias.float().view(heads, -1)
        # softplus of torch rounds the last few numbers of a tensor otherwise than those before.
        steps = torch.where(logs > 20.0, logs, torch.log1p(torch.exp(logs))).clamp(least, most)
        wide = wide * steps if scales_values else wide
        logs = steps if weight.dim() == 3 else steps * weight.float()[:, None]
    return repeated[0] * scale, repeated[1], wide, logs


def _decay_factor(logs: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    """Return what the states are multiplied with, [B, H, K or 1, V or 1]."""
    if weight is not None and weight.dim() == 3:
        return torch.exp(logs[..., None, :] * weight.float())
    return torch.exp(logs)[..., None]


@register_op(mutates_args=("pending",), error=AttentionError)
def commit_scans(
    pending: Annotated[torch.Tensor, "[R, P] int64, contiguous"],
    kept_parents: Annotated[torch.Tensor, "[R, 2, W] int64, contiguous"],
    rows: Annotated[torch.Tensor, "[B] int64"],
    nodes: Annotated[torch.Tensor, "[B] int32 or int64"],
) -> None:
    """Let the next ``linear_scan`` of all layers begin with the states after ``nodes`` of the last.

    Notes the path to each node, and moves no state: the next scan reads the state once anyway, and
    adds what the path has. After a prompt, the next one reads the state after its last row. Pads,
    whose row is 0, keep the state before any token. Call it once after each scan. One launch.

    Args:
        pending: Of a request row: its current slot, the number of nodes whose updates are to be
            added to it, and these nodes, P = W + 2.
        kept_parents: Kept parents.
        rows: Request rows; each at most once, except row 0.
        nodes: The last node of each request.
    """
    live = [(row, node) for row, node in zip(rows.tolist(), nodes.tolist(), strict=True) if row]
    outside = [node for _, node in live if not 0 <= node < kept_parents.shape[2]]
    outside += [row for row, _ in live if not 0 <= row < len(kept_parents)]
    if outside:
        raise AttentionError(
            f"commit_scans: a row or node is {outside[0]}, expected rows 0 to "
            f"{len(kept_parents) - 1} and nodes 0 to {kept_parents.shape[2] - 1}."
        )
    for row, last in live:
        slot, node = 1 - int(pending[row, 0]), last
        path: list[int] = []
        while node >= 0:
            path.insert(0, node)
            node = int(kept_parents[row, slot, node])
        path = [] if node == WHOLE else path
        pending[row, : 2 + len(path)] = torch.tensor([slot, len(path), *path])
