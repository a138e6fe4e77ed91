"""Tensor parallelism: each rank has a part of every layer, as the tp_plan of a model says.

transformers names a style for each module and parameter that ranks split. Weights are cut here, and
hooks of the modules add up or gather what the ranks compute, by the collectives of the group. The
modules compute as before otherwise, so that fused layers and quantised ones are split, too.
Embeddings are on every rank, whatever the plan says of them.

``transformers.distributed`` would hold the weights as DTensors, which decide on the host for each
operation what these hooks know. Styles checked with transformers 5.17 to 5.24.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import pad
from transformers import PreTrainedModel

from graphkit.distributed import Channel, RankGroup
from graphkit.errors import ConfigError
from graphkit.models.layout import output_head
from graphkit.models.quantization.linear import is_row_invariant
from graphkit.models.residual import DeferredResidualAdd


class _RankHook:
    """A hook with the collectives of a group, which copies of a model share."""

    def __init__(self, group: RankGroup) -> None:
        self._collectives, self._rank, self._size = group.collectives, group.rank, group.size

    def __deepcopy__(self, _memo: object) -> _RankHook:
        return self


class RankSum(_RankHook):
    """Forward hook that returns the sum of the results of all ranks.

    The sum of a product that a norm adds to the residual stream is left to that norm, unless the
    module is row-invariant: the norm of few rows adds squares in another order than that of many.
    """

    def __call__(self, module: nn.Module, _args: Any, output: torch.Tensor) -> torch.Tensor:
        """Return the sum."""
        if (
            isinstance(output, DeferredResidualAdd)
            and output.is_unread_product
            and not is_row_invariant(module)
        ):
            return output.over_ranks(self._collectives)
        return self._collectives.all_reduce(output.contiguous())


class GatheredColumns(_RankHook):
    """Forward hook that returns the columns of all ranks side by side."""

    def __init__(self, group: RankGroup, columns: int) -> None:
        super().__init__(group)
        self._columns = columns

    def __call__(self, _module: nn.Module, _args: Any, output: torch.Tensor) -> torch.Tensor:
        """Return all columns, [..., N]."""
        rows = self._collectives.all_gather(output.reshape(-1, output.shape[-1]).contiguous())
        return rows[:, : self._columns].view(*output.shape[:-1], self._columns)


class RankInput(_RankHook):
    """Forward pre-hook that passes a rank's columns of the input, or its share of a sum."""

    def __init__(self, group: RankGroup, kind: str) -> None:
        super().__init__(group)
        self._is_part = kind == "part"

    def __call__(self, _module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments, of which the first is changed."""
        rows, *others = args
        if not self._is_part:
            return (rows / self._size, *others)
        return (rows.chunk(self._size, -1)[self._rank], *others)


def gathers_columns(module: nn.Module) -> bool:
    """Return whether a module returns columns that other ranks compute."""
    return any(isinstance(hook, GatheredColumns) for hook in module._forward_hooks.values())


_NUMBER = re.compile(r"\.\d+(?=\.|$)")
_WHOLE = frozenset({
    "embedding_colwise", "embedding_rowwise", "local_params", "mla_kv_a_proj", "replicate",
    "replicated_with_grad_allreduce",
})  # fmt: skip
"""Styles whose weights are on every rank, and whose modules run as they are."""
_HEADS = ("num_attention_heads", "num_key_value_heads")
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "qkv_proj", "query_key_value")
"""Names of projections into heads, of which a rank needs whole ones."""


@dataclass(frozen=True, slots=True)
class _Style:
    """What a style does to the parameters and the results of a module.

    Attributes:
        dim: Dimension of a weight that is split, counted from the end; 0 for none. A vector is
            split if it is -2, as a bias is.
        packed: Whether the dimension holds two parts side by side, each of which is split.
        result: What happens to the results: ``""``, ``"sum"`` or ``"gather"``.
        input: What happens to the input: ``""``, ``"part"`` (this rank's columns), ``"share"`` (its
            share of a sum).
    """

    dim: int = 0
    packed: bool = False
    result: str = ""
    input: str = ""


_STYLES: Mapping[str, _Style] = {
    **dict.fromkeys(_WHOLE, _Style()),
    "all_reduce": _Style(result="sum"),
    "colwise": _Style(-2),
    "colwise_gather_output": _Style(-2, result="gather"),
    "colwise_rep": _Style(-2, result="gather"),
    "moe_identity_expert": _Style(input="share"),
    "moe_tp_experts": _Style(result="sum"),
    "packed_colwise": _Style(-2, packed=True),
    "packed_rowwise": _Style(-1, packed=True),
    "rowwise": _Style(-1, result="sum"),
    "rowwise_rep": _Style(-1, result="sum", input="part"),
    "rowwise_split_input": _Style(-1, result="sum", input="part"),
}


@dataclass(frozen=True, slots=True)
class Part:
    """The part of a tensor that one rank has.

    Attributes:
        dim: The dimension that is split, counted from the end.
        size: Its size in the whole tensor.
        spans: Begin and end of the parts in it, which lie side by side in the rank's tensor.
        padding: Zeros behind them, so that all ranks have tensors of one size.
    """

    dim: int
    size: int
    spans: tuple[tuple[int, int], ...]
    padding: int = 0

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the part of a tensor, with memory of its own."""
        parts = [tensor.narrow(self.dim, begin, end - begin) for begin, end in self.spans]
        part = torch.cat(parts, self.dim)
        return pad(part, [0, 0] * (-self.dim - 1) + [0, self.padding]) if self.padding else part


class RankSplit:
    """How ranks split a model. Creation is collective.

    Args:
        model: The whole model of transformers or draft head, which may be on the meta device.
        group: The ranks.

    Attributes:
        group: As passed.
        parts: What this rank has of each parameter that is split, by name.

    Raises:
        ConfigError: The model has no plan or one with a style that is not served, or a size cannot
            be split evenly.
    """

    def __init__(self, model: nn.Module, group: RankGroup) -> None:
        self.group, self._channel = group, Channel(group)
        plan: Mapping[str, str] = getattr(model, "tp_plan", None) or {}
        named = {**dict(model.named_modules()), **dict(model.named_parameters())}
        styles = {
            name: plan[_NUMBER.sub(".*", name)] for name in named if _NUMBER.sub(".*", name) in plan
        }
        name = type(model).__name__
        head = output_head(model) if isinstance(model, PreTrainedModel) else None
        unknown = {path: style for path, style in styles.items() if style not in _STYLES}
        if unknown:
            path, style = next(iter(unknown.items()))
            raise ConfigError(
                f"the tp_plan of {name} has the style {style!r} for {path}, which graphkit does "
                f"not serve. It serves {', '.join(sorted(_STYLES))}.",
                field="group",
            )
        self._styles = {path: _STYLES[style] for path, style in styles.items()}
        self._check_heads(model)
        self.parts: dict[str, Part] = {}
        for path, parameter in model.named_parameters(remove_duplicate=False):
            part = self._part(path, parameter.shape)
            if part is not None:
                self.parts[path] = part
        owners = {model.get_submodule(path.rpartition(".")[0]) for path in self.parts}
        if not owners - {head}:
            raise ConfigError(
                f"{name} has no tp_plan for its layers, so that ranks cannot split it. Run it on "
                "one device.",
                field="group",
            )

    def all(self, flag: bool) -> bool:
        """Return whether a flag is true on all ranks, all of which call this."""
        return bool(self.least(int(flag)))

    def least(self, number: int) -> int:
        """Return the least number of all ranks, all of which call this."""
        return min(mine for (mine,) in self._channel.gather([number]))

    def cut(self, model: nn.Module, names: Iterable[str] | None = None) -> None:
        """Replace parameters of a whole model by this rank's parts; in place.

        A tied output head becomes a parameter of its own.

        Args:
            model: The model, or another one of its class and sizes.
            names: The parameters; ``None`` selects all of ``parts``.
        """
        for path in self.parts if names is None else names:
            part = self.parts[path]
            owner, _, name = path.rpartition(".")
            module = model.get_submodule(owner)
            whole = module.get_parameter(name)
            parameter = nn.Parameter(part.of(whole.data), whole.requires_grad)
            setattr(module, name, parameter)

    def install(self, model: nn.Module) -> None:
        """Let the modules of a model that has this rank's parts use collectives; in place."""
        for path, style in self._styles.items():
            try:
                module = model.get_submodule(path)
            except AttributeError:  # a parameter
                continue
            if isinstance(module, nn.Linear):  # a gathered layer keeps the size of its result
                module.in_features = module.weight.shape[1]
                if style.result != "gather":
                    module.out_features = module.weight.shape[0]
            if style.input:
                module.register_forward_pre_hook(RankInput(self.group, style.input))
            if style.result == "gather":
                columns = self.parts[f"{path}.weight"].size
                module.register_forward_hook(GatheredColumns(self.group, columns))
            elif style.result:
                module.register_forward_hook(RankSum(self.group))
                bias = getattr(module, "bias", None)
                if style.dim and bias is not None and self.group.rank:
                    module.bias = nn.Parameter(torch.zeros_like(bias), requires_grad=False)

    def _part(self, path: str, shape: torch.Size) -> Part | None:
        """Return the part of a parameter, or ``None`` if each rank has all of it."""
        style = self._styles.get(path, self._styles.get(path.rpartition(".")[0], _Style()))
        if not style.dim or (len(shape) == 1 and style.dim == -1):  # a bias is added to the sum
            return None
        dim = -1 if len(shape) == 1 else style.dim
        size, ranks, rank = shape[dim], self.group.size, self.group.rank
        if style.result == "gather":
            share = -(-size // ranks)
            begin, end = (min(share * number, size) for number in (rank, rank + 1))
            return Part(dim, size, ((begin, end),), share - (end - begin))
        pieces = 2 if style.packed else 1
        if size % (ranks * pieces):
            raise ConfigError(
                f"{path} has {size} {'columns' if style.dim == -1 else 'rows'}, which {ranks} "
                "ranks cannot split evenly. Use a number of ranks that divides it.",
                field="group",
            )
        piece, share = size // pieces, size // pieces // ranks
        begins = [piece * number + share * rank for number in range(pieces)]
        return Part(dim, size, tuple((begin, begin + share) for begin in begins))

    def _check_heads(self, model: nn.Module) -> None:
        """Check that each rank has whole heads.

        Raises:
            ConfigError: It would not.
        """
        whole: Any = model.config
        config = whole.get_text_config(decoder=True)
        splits_heads = any(
            path.endswith(_PROJECTIONS) and not style.result and style.dim
            for path, style in self._styles.items()
        )
        for field in _HEADS if splits_heads else ():
            value = getattr(config, field, None)
            for count in value if isinstance(value, list | tuple) else (value or 0,):
                if count % self.group.size:
                    raise ConfigError(
                        f"{field} is {count}, which {self.group.size} ranks cannot split evenly. "
                        "Use a number of ranks that divides it.",
                        field="group",
                    )
