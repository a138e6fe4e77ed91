"""Layers of which each rank has a part: projections, and norms that add up the ranks.

The split is that of Megatron-LM (arXiv 1909.08053, section 3). Projections into heads and into the
MLP are split by output, those back to the residual stream by input. The products of the latter are
added up over the ranks, where possible together with the norm that follows. Output heads, and the
projections that merge the inputs of a draft head, are split by output and their results are
gathered, so that every rank has all of them, with the same bits. Embeddings and other norms are on
every rank.

``torch.distributed.tensor.parallel`` does not fit these layers: a ``MergedLinear`` has the rows of
several projections side by side, and each of them is split, not the whole. DTensor also decides on
the host, per operation, what a fixed layout needs no decision for.

Shapes: T tokens, R ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from torch import Tensor, nn

from graphkit.distributed import RankGroup
from graphkit.errors import ConfigError
from graphkit.models.heads.config import LayerConfig
from graphkit.models.heads.eagle3 import Eagle3Head, Eagle3Layer
from graphkit.models.heads.layers import DecoderLayer, RMSNorm
from graphkit.ops.linear import project

Head = TypeVar("Head", bound=nn.Module)

_BY_OUTPUT = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
_BY_INPUT = ("o_proj", "down_proj")
_GATHERED = ("lm_head", "fc", "eh_proj")
"""Names of the layers whose results are gathered."""
_SPLIT = ("num_attention_heads", "num_key_value_heads", "intermediate_size")


class InputSplitLinear(nn.Linear):
    """A linear layer whose input is split over the ranks.

    Args:
        layer: The layer with this rank's 1 / R of the inputs.
        group: The ranks.
        adds_up: Whether ``forward`` returns the sum over all ranks. If not, it returns this rank's
            summand, for a ``SummingNorm``.
    """

    def __init__(self, layer: nn.Linear, group: RankGroup, *, adds_up: bool) -> None:
        has_bias = getattr(layer, "bias", None) is not None
        super().__init__(layer.in_features, layer.out_features, bias=has_bias)
        self._has_bias = has_bias and group.rank == 0  # one summand has it
        self._adds_up, self._collectives = adds_up, group.collectives

    def forward(self, x: Tensor, *, split_k_partials: bool = False) -> Tensor:
        """Return the product, [T, out], or parts of it, [S, T, out], for a ``SummingNorm``."""
        bias = self.bias if self._has_bias else None
        if self._adds_up:
            return self._collectives.all_reduce(project(x, self.weight, bias))
        if split_k_partials and self._collectives.takes_parts(len(x), self.out_features, x.dtype):
            parts = project(x, self.weight, bias, split_k_partials=True)
            return parts if len(parts) > 1 else parts[0]
        return project(x, self.weight, bias)


class SummingNorm(RMSNorm):
    """A norm of the residual stream plus the sum of what each rank adds to it.

    Args:
        norm: Its size and epsilon.
        group: The ranks.
    """

    def __init__(self, norm: RMSNorm, group: RankGroup) -> None:
        super().__init__(len(norm.weight), norm.eps)
        self._collectives = group.collectives

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """See ``RMSNorm``; ``x`` is this rank's summand, which may be in parts."""
        return self._collectives.add_rms_norm(x, residual, self.weight, self.eps)


class GatheredLinear(nn.Linear):
    """A linear layer whose rows are split over the ranks; the last rank's may include padding.

    Args:
        layer: The whole layer.
        group: The ranks.
    """

    def __init__(self, layer: nn.Linear, group: RankGroup) -> None:
        self._columns, rows = layer.out_features, -(-layer.out_features // group.size)
        super().__init__(layer.in_features, rows, bias=layer.bias is not None)
        self._collectives = group.collectives

    def forward(self, x: Tensor) -> Tensor:
        """Return the whole result on every rank, [T, out]."""
        columns = project(x, self.weight, self.bias)
        return self._collectives.all_gather(columns)[:, : self._columns]


def split_layers(module: nn.Module, group: RankGroup, *, adds_up: bool) -> None:
    """Let decoder layers that have this rank's sizes add up their results over the ranks.

    Args:
        module: Has the layers; their projections and norms are replaced.
        group: The ranks.
        adds_up: Whether decoder layers return the sum of the results of the MLP over all ranks, not
            this rank's summand.
    """
    for layer in list(module.modules()):
        if isinstance(layer, DecoderLayer | Eagle3Layer):
            attention, mlp = layer.self_attn, layer.mlp
            attention.o_proj = InputSplitLinear(attention.o_proj, group, adds_up=False)
            layer.post_attention_layernorm = SummingNorm(layer.post_attention_layernorm, group)
            mlp.down_proj = InputSplitLinear(mlp.down_proj, group, adds_up=adds_up)


def split_head(
    build: Callable[[LayerConfig], Head], config: LayerConfig, group: RankGroup | None
) -> Head:
    """Return this rank's part of a draft head.

    Args:
        build: Returns the head of a configuration.
        config: The whole head.
        group: The ranks; ``None`` returns the whole head.

    Raises:
        ConfigError: Attention heads or MLP cannot be split evenly.
    """
    if group is None:
        return build(config)
    head = build(local_config(config, group.size))
    split_layers(head, group, adds_up=not isinstance(head, Eagle3Head))
    if isinstance(head, Eagle3Head):
        head.norm = SummingNorm(head.norm, group)
    for module in list(head.modules()):
        for name, layer in list(module.named_children()):
            if name in _GATHERED and isinstance(layer, nn.Linear):
                setattr(module, name, GatheredLinear(layer, group))
    return head


def local_config(config: LayerConfig, ranks: int) -> LayerConfig:
    """Return the sizes of one rank's layers.

    Raises:
        ConfigError: A size is not a multiple of the number of ranks.
    """
    for field in _SPLIT:
        if getattr(config, field) % ranks:
            raise ConfigError(
                f"{field} is {getattr(config, field)}, which {ranks} ranks cannot split evenly. "
                "Use a number of ranks that divides it.",
                field=field,
            )
    return replace(config, **{field: getattr(config, field) // ranks for field in _SPLIT})


def part_of(name: str, shape: Sequence[int], group: RankGroup | None) -> tuple[slice, ...]:
    """Return the slice of a tensor of a whole model or head that this rank has.

    Args:
        name: Name in the state dict.
        shape: Shape of the whole tensor.
        group: The ranks; ``None`` has the whole tensor.
    """
    if group is None:
        return ()
    layer = name.rsplit(".", 2)[-2] if "." in name else name
    if layer in _GATHERED:
        rows = -(-shape[0] // group.size)
        return (slice(min(group.rank * rows, shape[0]), min((group.rank + 1) * rows, shape[0])),)
    if layer in _BY_OUTPUT:
        return (_share(shape[0], group),)
    if layer in _BY_INPUT and name.endswith(".weight"):
        return (slice(None), _share(shape[1], group))
    return ()


def _share(size: int, group: RankGroup) -> slice:
    part = size // group.size
    return slice(group.rank * part, (group.rank + 1) * part)
