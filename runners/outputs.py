"""What a forward returns in each mode, and the live rows of it."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Self

import torch

from graphkit.buffers import Axis
from graphkit.config import BufferSizes
from graphkit.errors import OutputError

_PER_TOKEN = {"axis": Axis.TOKEN}


@dataclass(kw_only=True, eq=False)
class Output(ABC):
    """What the outputs of all modes share.

    From a replay, every tensor aliases graph memory: valid until the next replay of that pool.
    """

    @classmethod
    @abstractmethod
    def empty(cls, sizes: BufferSizes, device: torch.device) -> Self:
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
            OutputError: It is of another type, or a field has too few or too many rows.
        """
        if not isinstance(output, cls):
            raise OutputError(
                f"the forward returned a {type(output).__name__}. Return graphkit.{cls.__name__}."
            )
        count = {Axis.REQUEST: requests, Axis.TOKEN: tokens}
        for field in dataclasses.fields(cls):
            tensor, wanted = getattr(output, field.name), count[field.metadata["axis"]]
            if tensor is None and field.default is None:
                continue
            if not isinstance(tensor, torch.Tensor) or tensor.ndim < 2:
                raise OutputError(
                    f"the forward returned {field.name} as {_kind(tensor)}. "
                    "Return a tensor with a row for each."
                )
            if tensor.shape[0] != wanted:
                raise OutputError(
                    f"the forward returned {tensor.shape[0]} rows of {field.name} for "
                    f"{wanted} {field.metadata['axis'].value}s. Return a row for each."
                )
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
class VerifyOutput(Output):
    """What a TARGET_VERIFY or DECODE forward returns.

    Shapes:
        next_token_logits: [T, V]. hidden_states: [T, H], if the draft model wants them.
    """

    next_token_logits: torch.Tensor = dataclasses.field(metadata=_PER_TOKEN)
    hidden_states: torch.Tensor | None = dataclasses.field(default=None, metadata=_PER_TOKEN)

    @classmethod
    def empty(cls, sizes: BufferSizes, device: torch.device) -> Self:
        """See ``Output.empty``."""
        return cls(
            next_token_logits=torch.empty(0, sizes.vocab_size, dtype=sizes.dtype, device=device),
            hidden_states=torch.empty(0, sizes.hidden_size, dtype=sizes.dtype, device=device),
        )


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"
