"""Mixers as five launches: a product, the convolution, the scan, the gated norm, and a product.

Between these, mixers of transformers only move columns, and compute gates of single numbers. What
they move where is found by their own forward: its linear layers return the numbers of their
columns, and these numbers arrive in the arguments of the convolution, of the scan and of the norm.
The gates of the delta rule are found by random numbers in their place. A mixer that does anything
else runs as ``graphkit.models.scans`` says.

Suffixes: T rows, C channels, H heads of values, V values, M columns of all linear layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import nn
from torch.nn.functional import softplus

from graphkit.engine.kv.scanned import ScanShape
from graphkit.models.cache import StateCache
from graphkit.models.fusion.observation import agree, random_rows
from graphkit.models.layout import RecurrentLayer
from graphkit.models.running import NodeScan, replaced_forwards, running_scan
from graphkit.ops.decoder import gated_rms_norm

_ROWS = 2
_EXACT = 1e-6
"""Largest relative error of a gate that is computed from another column's number by chance."""


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """Where numbers come from: a linear layer, and its column of each, int64 on its device."""

    layer: nn.Module
    index: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class GatedNorm:
    """A norm with a gate, see ``gated_rms_norm``.

    Attributes:
        module: The norm, whose weight is its only parameter.
        eps: Added to mean squares.
        size: Columns of a group.
        gate_first: Whether the gate comes before the norm.
        sigmoid: Whether the gate is a sigmoid.
    """

    module: nn.Module
    eps: float
    size: int
    gate_first: bool
    sigmoid: bool

    def __call__(
        self, rows: torch.Tensor, gate: torch.Tensor, columns: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Normalise rows, [T, C], with gates, [T, M]."""
        (weight,) = self.module.parameters()
        return gated_rms_norm(
            rows, gate, weight, self.eps, self.size, self.gate_first, self.sigmoid, columns
        )


def find_gated_norm(module: nn.Module, width: int, like: torch.Tensor) -> GatedNorm | None:
    """Return a norm of rows of a width and a gate, or ``None`` if the module is none."""
    weights = list(module.parameters())
    if len(weights) != 1 or weights[0].dim() != 1 or "forward" in vars(module):
        return None
    sizes = {len(weights[0]), *(v for v in vars(module).values() if type(v) is int and v > 0)}
    sizes |= {width // v for v in vars(module).values() if type(v) is int and v > 0}
    numbers = sorted(v for v in vars(module).values() if isinstance(v, float) and v >= 0)
    rows, gate = (random_rows(like.new_empty(8, width), seed) for seed in (0, 1))
    expected = module(rows, gate)
    fitting = [size for size in sorted(sizes) if size and width % size == 0]
    fitting = [size for size in fitting if len(weights[0]) in (size, width)]
    for options in product(numbers, fitting, (False, True), (False, True)):
        norm = GatedNorm(module, *options)
        if agree(expected, norm(rows, gate)):
            return norm
    return None


class FusedMixer:
    """The forward of a mixer, over the rows of the running batch.

    Args:
        layer: The layer.
        call: What its functions receive.
        found: Columns of the inputs by name.
        mixer: The module, whose parameters are read at each call: they may be replaced.
        decay: Names of the parameters of the decay: its weight as a logarithm, and its bias.
        beta_scale: Factor of a sigmoid; 0 without beta.
        norm: The gated norm.
        out: The last linear layer.

    Attributes:
        number: Index among the recurrent layers.
        text: What runs, for ``ModelLayout.replaced``.
    """

    text = "products, graphkit::causal_conv, graphkit::linear_scan and graphkit::gated_rms_norm"

    def __init__(
        self,
        layer: RecurrentLayer,
        call: _Call,
        found: dict[str, Columns],
        mixer: nn.Module,
        decay: tuple[str, str],
        beta_scale: float,
        norm: GatedNorm,
        out: nn.Module,
    ) -> None:
        self.number, self._call, self._found = 0, call, found
        self._mixer, self._decay, self._skip = mixer, decay, call.skip
        self._options, self._limits = (
            {name: call.options[name] for name in names if name in call.options}
            for names in (("scale", "normalise"), ("least", "most"))
        )
        self._beta_scale, self._norm, self._out = beta_scale, norm, out
        assert layer.recurrence is not None, "the mixer has a scan"
        self._shape = layer.recurrence
        # In the order in which the mixer calls them: the first computes the product of all.
        self._layers = [x for x in call.layers if any(x is y.layer for y in found.values())]

    def __call__(self, hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:
        """Run the mixer over the rows of a batch, [1, T, H]."""
        scan, call, shape = running_scan(), self._call, self._shape
        products = {layer: layer(hidden_states)[0] for layer in self._layers}
        conv, decay, gate = (self._found[name] for name in ("conv", "decay", "gate"))
        assert call.conv is not None, "the probe has noted it"
        mixed = scan.convolve(
            self.number, products[conv.layer], call.conv.weight.squeeze(1), call.conv.bias,
            call.silu, conv.index,
        )  # fmt: skip
        query, key, value = (
            mixed[:, begin : begin + heads * size].unflatten(1, (heads, size))
            for begin, heads, size in zip(
                call.begins,
                (shape.groups, shape.groups, shape.heads),
                (shape.keys, shape.keys, shape.values),
                strict=True,
            )
        )
        beta = self._found.get("beta")
        log_weight, bias = (getattr(self._mixer, name) for name in self._decay)
        limits = self._limits if scan.is_prompt else {}
        out = scan.recur(
            self.number, shape, query, key, value, products[decay.layer],
            None if beta is None else products[beta.layer], decay_weight=log_weight,
            decay_bias=bias, log_weight=True, beta_scale=self._beta_scale,
            decay_columns=decay.index, beta_columns=None if beta is None else beta.index,
            skip=getattr(self._mixer, self._skip) if self._skip else None,
            **self._options, **limits,
        )  # fmt: skip
        out = self._norm(out.flatten(1), products[gate.layer], gate.index)
        result: torch.Tensor = self._out(out[None])
        return result


class _Call(NodeScan):
    """Notes what the functions and modules of a mixer receive, and returns numbers of columns.

    Attributes:
        layers: The linear layers, in the order of their calls before the scan.
    """

    is_prompt = True

    def __init__(self, mixer: nn.Module, numbers: Callable[[int], torch.Tensor]) -> None:
        self._mixer, self._numbers = mixer, numbers
        self.layers: list[nn.Module] = []
        self.begins: list[int] = []
        self.conv: Any = None
        self.silu = False
        self.conv_input: torch.Tensor | None = None
        self.inputs: tuple[Any, ...] = ()
        self.options: dict[str, Any] = {}
        self.norm: nn.Module | None = None
        self.norm_inputs: tuple[torch.Tensor, torch.Tensor] | None = None
        self.out: nn.Module | None = None
        self.out_input: torch.Tensor | None = None

    @property
    def skip(self) -> str:
        """Name of the parameter that is the factor on the values; empty without."""
        skip = self.options.get("skip")
        own = self._mixer.named_parameters(recurse=False)
        return next((name for name, parameter in own if parameter is skip), "")

    def convolve(self, layer: int, x: torch.Tensor, weight: torch.Tensor, *others: Any) -> Any:  # noqa: ARG002
        chosen = [
            child for child in self._mixer.modules()
            if isinstance(child, nn.Conv1d) and child.weight.data_ptr() == weight.data_ptr()
        ]  # fmt: skip
        self.conv = chosen[0] if chosen and self.conv is None else None
        self.conv_input, (_, self.silu) = x, others
        return torch.arange(x.shape[1], dtype=torch.float32, device=x.device).expand(_ROWS, -1)

    def recur(self, layer: int, shape: ScanShape, *inputs: Any, **options: Any) -> torch.Tensor:  # noqa: ARG002
        self.inputs, self.options = inputs, options
        ids = torch.arange(shape.heads * shape.values, dtype=torch.float32, device=inputs[2].device)
        return ids.view(shape.heads, shape.values).expand(_ROWS, -1, -1)

    @contextmanager
    def patched(self) -> Iterator[None]:
        """Let the linear layers and norms of the mixer note and return numbers."""

        def linear(child: Any, *args: torch.Tensor, **_: Any) -> torch.Tensor:
            if self.inputs:
                self.out = child if self.out is None else self._mixer
                self.out_input = args[0]
                return self.out_input.new_zeros(1, _ROWS, child.out_features)
            if child not in self.layers:
                self.layers.append(child)
            begin = sum(x.out_features for x in self.layers[: self.layers.index(child)])  # type: ignore[misc]
            return self._numbers(begin + child.out_features)[..., begin:]

        def norm(child: nn.Module, rows: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
            self.norm = child if self.norm is None else self._mixer
            self.norm_inputs = rows, gate
            return rows

        forwards: dict[nn.Module, Callable[..., Any]] = {}
        for child in self._mixer.modules():
            if child is self._mixer or isinstance(child, nn.Conv1d):
                continue
            is_linear = isinstance(getattr(child, "out_features", None), int)
            if is_linear or (not list(child.children()) and list(child.parameters())):
                forwards[child] = partial(linear if is_linear else norm, child)
        with replaced_forwards(forwards):
            yield


def fused_mixer(
    mixer: nn.Module,
    layer: RecurrentLayer,
    forward: Callable[..., torch.Tensor],
    like: torch.Tensor,
) -> FusedMixer | None:
    """Return a mixer as five launches, or ``None`` if it does more than them."""
    shape = layer.recurrence
    if shape is None or shape.has_weight or shape.decays != 1:
        return None
    device = like.device

    def called(numbers: Callable[[int], torch.Tensor]) -> _Call | None:
        call = _Call(mixer, numbers)
        hidden = torch.zeros(1, _ROWS, like.shape[-1], device=device)
        with torch.no_grad(), call.running(), call.patched():
            out = forward(hidden, **{layer.cache_argument: StateCache()})
        is_done = call.out not in (None, mixer) and call.norm not in (None, mixer)
        return call if is_done and call.conv is not None and out.shape[1] == _ROWS else None

    call = called(lambda count: torch.arange(count, dtype=torch.float32, device=device).expand(
        1, _ROWS, -1))  # fmt: skip
    if call is None or not _scan_is_read_in_order(call, shape):
        return None
    assert call.norm is not None and call.norm_inputs is not None and call.out is not None  # noqa: PT018
    found = {"conv": call.conv_input, "gate": call.norm_inputs[1]}
    if call.inputs[4] is None:
        found["decay"] = call.inputs[3]
    columns = {name: _columns(call, ids) for name, ids in found.items()}
    beta_scale = 0.0
    if call.inputs[4] is not None:
        generator = torch.Generator().manual_seed(0)
        drawn = torch.randn(1, _ROWS, sum(x.out_features for x in call.layers),  # type: ignore[misc]
                            generator=generator).to(device)  # fmt: skip
        second = called(lambda count: drawn[..., :count])
        if second is None:
            return None
        beta_scale, betas = _beta_columns(second.inputs[4], drawn[0])
        decays, parameters = _decay_columns(mixer, second.inputs[3], drawn[0])
        columns |= {"beta": _columns(call, betas), "decay": _columns(call, decays)}
    else:
        parameters = _decay_parameters(mixer, call.options)
    norm = find_gated_norm(call.norm, call.norm_inputs[0].shape[-1], like)
    is_skipped = call.options.get("skip") is None or call.skip
    if norm is None or parameters is None or None in columns.values() or not is_skipped:
        return None
    whole = {name: part for name, part in columns.items() if part is not None}
    return FusedMixer(layer, call, whole, mixer, parameters, beta_scale, norm, call.out)


def _scan_is_read_in_order(call: _Call, shape: ScanShape) -> bool:
    """Note where queries, keys and values begin among the channels, and check their order."""
    assert call.norm_inputs is not None and call.out_input is not None  # noqa: PT018
    for part in call.inputs[:3]:
        flat = part.reshape(_ROWS, -1)
        begin = int(flat[0, 0])
        ids = begin + torch.arange(flat.shape[1], dtype=torch.float32, device=flat.device)
        if not torch.equal(flat, ids.expand(_ROWS, -1)):
            return False
        call.begins.append(begin)
    values = shape.heads * shape.values
    ids = torch.arange(values, dtype=torch.float32, device=call.out_input.device)
    return all(
        torch.equal(part.reshape(_ROWS, -1), ids.expand(_ROWS, -1))
        for part in (call.norm_inputs[0], call.out_input)
    )


def _columns(call: _Call, ids: torch.Tensor | None) -> Columns | None:
    """Return the layer that has all columns of these numbers, which are those of every row."""
    if ids is None:
        return None
    flat = ids.reshape(_ROWS, -1)
    if not torch.equal(flat[0], flat[1]) or not bool((flat == flat.round()).all()):
        return None
    begin = 0
    for layer in call.layers:
        count: int = layer.out_features  # type: ignore[assignment]
        if bool(((flat[0] >= begin) & (flat[0] < begin + count)).all()):
            return Columns(layer, (flat[0] - begin).long())
        begin += count
    return None


def _only(is_equal: torch.Tensor) -> torch.Tensor | None:
    """Return the column of each head that is equal in all rows, [rows, M, H], as [rows, H]."""
    both = is_equal.all(0)
    if not bool((both.sum(0) == 1).all()):
        return None
    return both.float().argmax(0).float().expand(len(is_equal), -1)


def _near(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return (one - other).abs() <= _EXACT * other.abs()


def _beta_columns(beta: torch.Tensor, drawn: torch.Tensor) -> tuple[float, torch.Tensor | None]:
    """Return the factor of a sigmoid of numbers, [rows, M], and the column of each head."""
    for scale in (1.0, 2.0):
        columns = _only(_near(scale * drawn.sigmoid()[..., None], beta.float()[:, None]))
        if columns is not None:
            return scale, columns
    return 0.0, None


def _decay_columns(
    mixer: nn.Module, decay: torch.Tensor, drawn: torch.Tensor
) -> tuple[torch.Tensor | None, tuple[str, str] | None]:
    """Return the column of each head's decay, and names of its parameters, the weight first."""
    for pair in _pairs(mixer, decay.shape[1]):
        weight, bias = (getattr(mixer, name).detach().float() for name in pair)
        made = -weight.exp() * softplus(drawn[..., None] + bias)
        columns = _only(_near(made, decay.float()[:, None]))
        if columns is not None:
            return columns, pair
    return None, None


def _decay_parameters(mixer: nn.Module, options: dict[str, Any]) -> tuple[str, str] | None:
    """Return the names of the parameters whose values a scan with time steps has received."""
    weight, bias = options["decay_weight"], options["decay_bias"]
    for pair in _pairs(mixer, len(weight)):
        log, other = (getattr(mixer, name) for name in pair)
        is_same = bias is not None and torch.equal(other, bias)
        if is_same and torch.equal(-log.detach().float().exp(), weight):
            return pair
    return None


def _pairs(mixer: nn.Module, heads: int) -> Sequence[tuple[str, str]]:
    """Return the names of pairs of the mixer's own parameters with a number for each head."""
    own = [name for name, p in mixer.named_parameters(recurse=False) if p.shape == (heads,)]
    return [(one, other) for one in own for other in own if one != other]
