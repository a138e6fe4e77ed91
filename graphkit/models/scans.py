"""Mixers whose convolution and recurrence run all nodes of a batch in one launch.

transformers computes both in functions of the module of a model, which have the same names and
arguments in all models, those of the kernel libraries that may replace them. Here a mixer runs its
own forward once, over the rows of all requests in a row, as if they were one prompt, with other
functions in the place of these two. They run over the pool of the running batch
(``graphkit.ops.recurrent``), so that each row follows its parent. What the forward computes around
them, it computes row by row. ``known_mixer`` compares the result with the mixer itself.

Suffixes: T rows, C channels, H heads of values, G heads of keys, K keys, V values.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from inspect import unwrap
from types import FunctionType
from typing import Any

import torch
from torch import nn
from transformers.activations import ACT2FN

from graphkit.engine.kv import RecurrentStatePool
from graphkit.engine.kv.recurrent_rows import ScanRows, States
from graphkit.engine.kv.scanned import ScanShape
from graphkit.errors import ConfigError, GraphkitError
from graphkit.models.cache import StateCache
from graphkit.models.fusion.observation import agree
from graphkit.models.layout import RecurrentLayer
from graphkit.models.running import NodeScan, running_scan
from graphkit.ops.recurrent import NO_LIMIT

logger = logging.getLogger(__name__)

_RECURRENCE = "recurrent0"
_LARGEST_DIFFERENCE = {torch.float32: 1e-3, torch.float64: 1e-3}
"""Largest root mean square difference of a mixer to itself, relative to its values, by dtype. Both
add in different orders, in several steps."""
_LARGEST_ROUNDED = 0.05
"""The same in other dtypes. transformers rounds time steps and states there for single tokens."""
_FAULTS = (GraphkitError, RuntimeError, ValueError, TypeError, KeyError, AttributeError)
"""What a mixer may raise that graphkit does not know."""
_NODES, _PROMPT = 4, 9
"""Nodes and rows that are compared."""


def known_mixer(
    mixer: nn.Module, layer: RecurrentLayer, device: torch.device, dtype: torch.dtype
) -> RecurrentLayer | None:
    """Return a layer with its recurrence, if all of its nodes can run in one launch.

    A mixer with other functions than those that graphkit computes, or that differs from itself by
    more than rounding with graphkit's, is none: its nodes run one after the other.
    """
    forward = scanned_forward(mixer, layer, 0)
    if forward is None or device.type == "meta" or set(layer.shapes) - {"conv0", _RECURRENCE}:
        return None
    noted, rows = _Noted(), random_rows(mixer, device, dtype)
    try:
        with torch.no_grad(), noted.running():
            forward(rows[:, :2], **{layer.cache_argument: StateCache()})
        found = noted.layer(layer)
    except _FAULTS as error:
        logger.warning("%s runs node by node: %s", layer.name, str(error).split("\n", 1)[0])
        return None
    return found if found and computes_the_same(mixer, forward, found, rows) else None


def computes_the_same(
    mixer: nn.Module,
    forward: Callable[..., torch.Tensor],
    layer: RecurrentLayer,
    rows: torch.Tensor,
) -> bool:
    """Return whether a forward over pooled states computes what a mixer computes, but for rounding.

    All ranks of a split model decide the same. A difference is logged.

    Args:
        mixer: The module.
        forward: The forward, as layer 0.
        layer: The layer, with its recurrence.
        rows: ``random_rows`` of the mixer.
    """
    allowed = _LARGEST_DIFFERENCE.get(rows.dtype, _LARGEST_ROUNDED)
    try:
        difference = _difference(mixer, forward, layer, rows)
    except _FAULTS as error:
        logger.warning("%s: %s", layer.name, str(error).split("\n", 1)[0])
        difference = float("inf")
    if not agree(True, difference <= allowed):
        logger.warning(
            "%s (%s) runs node by node or unfused: with graphkit's scan it differs from itself by "
            "%.2g of its values, at most %.2g is rounding.",
            layer.name, type(mixer).__name__, difference, allowed,
        )  # fmt: skip
        return False
    return True


def scanned_forward(
    mixer: nn.Module, layer: RecurrentLayer, number: int
) -> Callable[..., torch.Tensor] | None:
    """Return the forward of a mixer with graphkit's functions, or ``None`` if it has others."""
    function: Any = unwrap(type(mixer).forward)
    if "forward" in vars(mixer) or not isinstance(function, FunctionType):
        return None
    called = set(function.__code__.co_names) & function.__globals__.keys()
    convolutions, scans = called & _CONVOLUTIONS.keys(), called & _SCANS.keys()
    has_scan = _RECURRENCE in layer.shapes
    if len(convolutions) != ("conv0" in layer.shapes) or len(scans) != has_scan:
        return None
    replaced = {
        name: partial(made, number)
        for name, made in {**_CONVOLUTIONS, **_SCANS}.items()
        if name in called
    }
    own = FunctionType(
        function.__code__,
        {**function.__globals__, **replaced},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    own.__kwdefaults__ = function.__kwdefaults__
    return partial(own, mixer)


def _convolve(
    number: int,
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> torch.Tensor:
    """Compute ``causal_conv1d_fn`` of causal-conv1d, [1, C, T]."""
    is_silu = activation in ("silu", "swish")
    out = running_scan().convolve(number, hidden_states[0].t(), weight, bias, is_silu)
    if activation is not None and not is_silu:
        out = ACT2FN[activation](out)
    return out.t()[None]


def _delta_rule(
    number: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *_: Any,
    use_qk_l2norm_in_kernel: bool = False,
    **__: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute ``chunk_gated_delta_rule`` or ``chunk_kda`` of flash-linear-attention."""
    (groups, keys), (heads, values) = key.shape[2:], value.shape[2:]
    decays = 1 if g.dim() == 3 else keys
    shape = ScanShape(_RECURRENCE, heads, groups, keys, values, decays)
    out = running_scan().recur(
        number, shape, query[0], key[0], value[0], g[0], beta[0],
        scale=keys**-0.5, normalise=use_qk_l2norm_in_kernel,
    )  # fmt: skip
    return out[None], _no_state(out)


def _mamba2(
    number: int,
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,  # noqa: N803 - names of the library's arguments
    B: torch.Tensor,  # noqa: N803
    C: torch.Tensor,  # noqa: N803
    *_: Any,
    D: torch.Tensor | None = None,  # noqa: N803
    dt_bias: torch.Tensor | None = None,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    z: torch.Tensor | None = None,
    dt_softplus: bool = False,
    **__: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute ``mamba_chunk_scan_combined`` of mamba-ssm."""
    (heads, values), (groups, keys) = hidden_states.shape[2:], B.shape[2:]
    shape = ScanShape(_RECURRENCE, heads, groups, keys, values, transposed=True)
    scan = running_scan()
    # transformers limits the time steps of prompts, but not those of single tokens.
    limits = {"least": dt_limit[0], "most": min(dt_limit[1], NO_LIMIT)} if scan.is_prompt else {}
    out = scan.recur(
        number, shape, C[0], B[0], hidden_states[0], dt[0], None,
        decay_weight=_steps(A, dt_softplus), decay_bias=dt_bias, skip=D,
        gate=None if z is None else z[0], **limits,
    )  # fmt: skip
    return out[None], _no_state(out)


def _mamba(
    number: int,
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,  # noqa: N803 - names of the library's arguments
    B: torch.Tensor,  # noqa: N803
    C: torch.Tensor,  # noqa: N803
    D: torch.Tensor | None = None,  # noqa: N803
    z: torch.Tensor | None = None,
    delta_bias: torch.Tensor | None = None,
    delta_softplus: bool = False,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute ``selective_scan_fn`` of mamba-ssm: channels are values of one head, [1, V, T]."""
    values, keys = A.shape
    shape = ScanShape(_RECURRENCE, 1, 1, keys, values, values, transposed=True, has_weight=True)

    def rows(x: torch.Tensor) -> torch.Tensor:
        return x[0].t()[:, None]  # [T, 1, channels]

    out = running_scan().recur(
        number, shape, rows(C), rows(B), rows(hidden_states), rows(dt), None,
        decay_weight=_steps(A, delta_softplus)[None],
        decay_bias=None if delta_bias is None else delta_bias[None],
        skip=None if D is None else D[None], gate=None if z is None else rows(z),
    )  # fmt: skip
    return out[:, 0].t()[None], _no_state(out)


def _steps(weight: torch.Tensor, softplus: bool) -> torch.Tensor:
    """Return the weight of time steps, which are those of softplus."""
    if not softplus:
        raise ValueError("its time steps are no softplus")
    return weight.float()


def _no_state(out: torch.Tensor) -> torch.Tensor:
    """Return a tensor in the place of the last state, which the pool has."""
    return out.new_empty(0, dtype=torch.float32)


_CONVOLUTIONS: Mapping[str, Callable[..., Any]] = {"causal_conv1d_fn": _convolve}
_SCANS: Mapping[str, Callable[..., Any]] = {
    "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "mamba2_chunk_scan": _mamba2,
    "mamba_selective_scan": _mamba,
}
"""Functions of transformers 5.21 to 5.24 that compute whole prompts, by name."""


class _Noted(NodeScan):
    """Notes what a mixer passes to its functions, which then return zeros."""

    def __init__(self) -> None:
        self.shapes: list[ScanShape] = []
        self.convolutions = 0

    is_prompt = True

    def convolve(self, layer: int, x: torch.Tensor, *_: Any) -> torch.Tensor:  # noqa: ARG002
        self.convolutions += 1
        return torch.zeros_like(x)

    def recur(self, layer: int, shape: ScanShape, *inputs: Any, **_: Any) -> torch.Tensor:  # noqa: ARG002
        self.shapes.append(shape)
        return torch.zeros_like(inputs[2])

    def layer(self, layer: RecurrentLayer) -> RecurrentLayer | None:
        """Return a layer with its recurrence, or ``None`` if its states are others."""
        if self.convolutions != ("conv0" in layer.shapes) or len(self.shapes) > 1:
            return None
        if not self.shapes:
            return replace(layer, runs_at_once=True)
        (shape,) = self.shapes
        expected = layer.shapes[_RECURRENCE]
        if expected not in (shape.state, shape.state[shape.heads == 1 :]):
            return None
        return replace(layer, runs_at_once=True, recurrence=shape)


def random_rows(mixer: nn.Module, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Return hidden states for ``computes_the_same``, like those of a norm, [1, T, H]."""
    inputs = [getattr(child, "in_features", None) for child in mixer.modules()]
    size = getattr(mixer, "hidden_size", None) or next((n for n in inputs if n), 1)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(1, _PROMPT + 2 * _NODES, size, generator=generator)
    return rows.to(device, dtype)


def _difference(
    mixer: nn.Module,
    forward: Callable[..., torch.Tensor],
    layer: RecurrentLayer,
    rows: torch.Tensor,
) -> float:
    """Return how much a prompt and two trees behind it differ from the mixer itself.

    The first tree begins with the states after the prompt, and the second one with those after a
    node of the first. So all of states, commit and outputs are compared.
    """
    device = rows.device
    pool = state_pool([layer], 2, _NODES, device)
    row = torch.ones(1, dtype=torch.int64, device=device)
    parents = torch.tensor([[-1, 0, 0, 2]], device=device)
    order = torch.arange(_NODES, device=device)[None]
    begins = torch.tensor([0, _PROMPT], device=device)
    prompt = ScanRows(row, _PROMPT, begins)
    tree = ScanRows(row, _NODES, None, parents, order)
    steps = [rows[:, _PROMPT:][:, :_NODES], rows[:, _PROMPT + _NODES :]]

    def scanned(part: ScanRows, hidden: torch.Tensor, node: int) -> torch.Tensor:
        with NodeScan(pool, scan_rows=part).running():
            out = forward(hidden, **{layer.cache_argument: StateCache()})
        pool.commit(row, torch.full_like(row, node))
        return out

    def own(states: States, hidden: torch.Tensor) -> tuple[States, torch.Tensor]:
        cache: Any = StateCache({name: state.clone() for name, state in states.items()})
        out = mixer(hidden, **{layer.cache_argument: cache})
        return cache.states, out

    with torch.no_grad():
        made = [scanned(prompt, rows[:, :_PROMPT], 0)]
        made += [scanned(tree, step, node) for step, node in zip(steps, (3, 1), strict=True)]
        zeros = {
            name: torch.zeros(1, *shape, dtype=layer.dtypes[name], device=device)
            for name, shape in layer.shapes.items()
        }
        states, out = own(zeros, rows[:, :_PROMPT])
        wanted = [out]
        for step, node in zip(steps, (3, 1), strict=True):
            after: list[States] = []
            for place in range(_NODES):
                above = int(parents[0, place])
                new, out = own(states if above < 0 else after[above], step[:, place : place + 1])
                after.append(new)
                wanted.append(out)
            states = after[node]
    one, other = torch.cat(made, 1).float(), torch.cat(wanted, 1).float()
    # A wrong state may change outputs little: compare the worst row, and the states.
    pairs = [(one[0], other[0])]
    committed = pool.committed()
    pairs += [
        (committed[f"{name}.0"][1].flatten()[None].float(), state.flatten()[None].float())
        for name, state in states.items()
    ]
    return max(
        float(((a - b).norm(dim=-1) / b.norm(dim=-1).clamp(min=1e-6)).max()) for a, b in pairs
    )


def state_pool(
    layers: Sequence[RecurrentLayer], requests: int, width: int, device: torch.device
) -> RecurrentStatePool:
    """Create the pool of the states of recurrent layers.

    Args:
        layers: The layers, at least one.
        requests: Request rows.
        width: Most nodes per request in one step.
        device: Device of the states.

    Raises:
        ConfigError: Two layers have states of different shapes.
    """
    first = layers[0]
    for layer in layers[1:]:
        if layer.shapes != first.shapes:
            raise ConfigError(
                f"{layer.name} has states {dict(layer.shapes)}, but {first.name} has "
                f"{dict(first.shapes)}: graphkit keeps one shape of each kind for all layers.",
                field="model",
            )
    shapes = dict(first.shapes)
    if first.recurrence is not None:
        shapes[first.recurrence.kind] = first.recurrence.state
    return RecurrentStatePool(
        requests, width, len(layers), device, shapes=shapes, dtypes=first.dtypes,
        recurrence=first.recurrence, runs_at_once=all(layer.runs_at_once for layer in layers),
    )  # fmt: skip
