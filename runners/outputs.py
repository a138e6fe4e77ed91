"""What a forward or a runner returns in each mode, and the live rows of it."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Self

import torch

from graphkit.buffers import Axis
from graphkit.config import BufferSizes
from graphkit.errors import OutputError
from graphkit.spec import SpecConfig

_PER_TOKEN, _PER_REQUEST = {"axis": Axis.TOKEN}, {"axis": Axis.REQUEST}


@dataclass(kw_only=True, eq=False)
class Output(ABC):
    """What the outputs of all modes share.

    From a replay, every tensor aliases graph memory: valid until the next replay of that pool.
    """

    @classmethod
    @abstractmethod
    def empty(cls, spec: SpecConfig, sizes: BufferSizes, device: torch.device) -> Self:
        """The output of an idle batch before anything was captured: no rows."""

    def live(self, requests: int, tokens: int) -> Self:
        """The first rows of every field, as views."""
        count = {Axis.REQUEST: requests, Axis.TOKEN: tokens}
        return self._map(lambda axis, tensor: tensor[: count[axis]])

    def clone(self) -> Self:
        """A copy that outlives the next replay."""
        return self._map(lambda _axis, tensor: tensor.clone())

    def tensors(self) -> dict[str, torch.Tensor]:
        """The fields that are present, by name."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    @classmethod
    def checked(cls, output: Any, requests: int, tokens: int) -> Self:
        """The output of a forward, if it is one.

        Raises:
            OutputError: It is of another type, has a field that no graph would give back, or one
                with too few or too many rows.
        """
        fields = dataclasses.fields(cls)
        if not isinstance(output, cls) or len(dataclasses.fields(output)) != len(fields):
            raise OutputError(
                f"the forward returned a {type(output).__name__}. Return graphkit.{cls.__name__}."
            )
        count = {Axis.REQUEST: requests, Axis.TOKEN: tokens}
        for field in fields:
            tensor, axis = getattr(output, field.name), field.metadata["axis"]
            if tensor is not None or field.default is not None:
                check_rows(field.name, tensor, {axis.value: count[axis]})
        return output

    def _map(self, change: Any) -> Self:
        return type(self)(
            **{
                field.name: None if value is None else change(field.metadata["axis"], value)
                for field in dataclasses.fields(self)
                for value in [getattr(self, field.name)]
            }
        )


@dataclass(kw_only=True, eq=False)
class ForwardOutput(Output):
    """What a TARGET_VERIFY or DECODE forward returns; forwards of draft models may return it too.

    Shapes:
        next_token_logits: [T, V]. hidden_states: [T, H], if the draft model wants them.
    """

    next_token_logits: torch.Tensor = dataclasses.field(metadata=_PER_TOKEN)
    hidden_states: torch.Tensor | None = dataclasses.field(default=None, metadata=_PER_TOKEN)

    @classmethod
    def empty(cls, spec: SpecConfig, sizes: BufferSizes, device: torch.device) -> Self:  # noqa: ARG003
        """See ``Output.empty``."""
        return cls(
            next_token_logits=torch.empty(0, sizes.vocab_size, dtype=sizes.dtype, device=device),
            hidden_states=torch.empty(0, sizes.hidden_size, dtype=sizes.dtype, device=device),
        )


@dataclass(kw_only=True, eq=False)
class DraftOutput(Output):
    """The draft tree of each request, as ``graphkit.ops.build_tree`` reads it.

    Shapes:
        parent_list: [B, K * (S - 1) + 1] int64. top_scores_index, draft_tokens: [B, W - 1] int64.
    """

    parent_list: torch.Tensor = dataclasses.field(metadata=_PER_REQUEST)
    top_scores_index: torch.Tensor = dataclasses.field(metadata=_PER_REQUEST)
    draft_tokens: torch.Tensor = dataclasses.field(metadata=_PER_REQUEST)

    @classmethod
    def empty(cls, spec: SpecConfig, sizes: BufferSizes, device: torch.device) -> Self:  # noqa: ARG003
        """See ``Output.empty``."""
        parents = spec.topk * (spec.num_steps - 1) + 1
        nodes = torch.empty(0, spec.num_draft_tokens - 1, dtype=torch.int64, device=device)
        return cls(
            parent_list=nodes.new_empty(0, parents), top_scores_index=nodes, draft_tokens=nodes
        )


@dataclass(kw_only=True, eq=False)
class DraftExtendOutput(Output):
    """What the draft model makes of the accepted tokens.

    v2 has a row of logits and hidden states for each token and no top-k, which is the worker's, on
    the rows that it selects.

    Shapes:
        next_token_logits: [T, V]. hidden_states: [T, H], if the draft model makes them.
        topk_p: [B, K] float32. topk_index: [B, K] int64.
    """

    next_token_logits: torch.Tensor = dataclasses.field(metadata=_PER_TOKEN)
    hidden_states: torch.Tensor | None = dataclasses.field(default=None, metadata=_PER_TOKEN)
    topk_p: torch.Tensor | None = dataclasses.field(default=None, metadata=_PER_REQUEST)
    topk_index: torch.Tensor | None = dataclasses.field(default=None, metadata=_PER_REQUEST)

    @classmethod
    def empty(cls, spec: SpecConfig, sizes: BufferSizes, device: torch.device) -> Self:  # noqa: ARG003
        """See ``Output.empty``."""
        vocab_size = sizes.draft_vocab_size or sizes.vocab_size
        return cls(
            next_token_logits=torch.empty(0, vocab_size, dtype=sizes.dtype, device=device),
            hidden_states=torch.empty(0, sizes.hidden_size, dtype=sizes.dtype, device=device),
        )


@dataclass(kw_only=True, eq=False)
class LastRowOutput(DraftExtendOutput):
    """A ``DraftExtendOutput`` of the last accepted token of each request alone.

    Shapes:
        next_token_logits: [B, V]. hidden_states: [B, H]. topk_p, topk_index: [B, K].
    """

    next_token_logits: torch.Tensor = dataclasses.field(metadata=_PER_REQUEST)
    hidden_states: torch.Tensor | None = dataclasses.field(default=None, metadata=_PER_REQUEST)

    @classmethod
    def empty(cls, spec: SpecConfig, sizes: BufferSizes, device: torch.device) -> Self:
        """See ``Output.empty``."""
        empty = super().empty(spec, sizes, device)
        empty.topk_p = torch.empty(0, spec.topk, device=device)
        empty.topk_index = torch.empty(0, spec.topk, dtype=torch.int64, device=device)
        return empty


@dataclass(kw_only=True, eq=False)
class LayersOutput(LastRowOutput):
    """A ``LastRowOutput`` of each layer of a chain.

    Shapes:
        next_token_logits: [B, S, V]. hidden_states: [B, S, H], if every layer makes them.
        topk_p, topk_index: [B, S, K].
    """

    @classmethod
    def empty(cls, spec: SpecConfig, sizes: BufferSizes, device: torch.device) -> Self:
        """See ``Output.empty``."""
        layer = super().empty(spec, sizes, device)
        return layer._map(lambda _axis, rows: rows.new_empty(0, spec.num_steps, rows.shape[1]))


def check_rows(name: str, tensor: Any, allowed: dict[str, int]) -> None:
    """Refuse what is no tensor with one of the allowed numbers of rows.

    Args:
        name: The output field.
        tensor: What the forward returned for it.
        allowed: Numbers of rows, by what there is a row of.

    Raises:
        OutputError: It is not.
    """
    if not isinstance(tensor, torch.Tensor) or tensor.ndim < 2:
        raise OutputError(
            f"the forward returned {name} as {_kind(tensor)}. Return a tensor with a row for each."
        )
    if tensor.shape[0] not in allowed.values():
        wanted = " or ".join(f"{count} {what}s" for what, count in allowed.items())
        raise OutputError(
            f"the forward returned {tensor.shape[0]} rows of {name} for {wanted}. "
            "Return a row for each."
        )


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"
