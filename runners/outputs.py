"""Outputs of forwards and runners, and their live rows.

From a replay, every tensor aliases graph memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch

from graphkit.buffers import Axis
from graphkit.config import BufferSizes
from graphkit.errors import OutputError
from graphkit.runners.output_fields import declare_output, output_fields_of
from graphkit.spec import SpecConfig


@dataclass(kw_only=True, eq=False)
class Output:
    """Base of the outputs of all modes.

    The tensors of a replay alias graph memory. They are valid until the next replay in that pool.
    """

    from_draft_model: ClassVar[bool] = False
    """Whether V is the draft model's vocabulary."""

    @classmethod
    def empty(cls, spec: SpecConfig, sizes: BufferSizes, device: torch.device) -> Self:
        """Return an output without rows, for an idle batch of a runner that is not captured."""
        draft_vocab = sizes.draft_vocab_size if cls.from_draft_model else None
        letters = {
            "V": draft_vocab or sizes.vocab_size,
            "H": sizes.hidden_size,
            "D": sizes.spec_hidden_size or sizes.hidden_size,
            "S": spec.num_steps,
            "K": spec.topk,
            "N": spec.num_draft_tokens - 1,
            "P": spec.topk * (spec.num_steps - 1) + 1,
        }
        rows = {}
        for name, declared in output_fields_of(cls).items():
            if declared.row is None:
                continue
            row = (letters[n] if isinstance(n, str) else n for n in declared.row)
            dtype = sizes.dtype if isinstance(declared.dtype, str) else declared.dtype
            rows[name] = torch.empty(0, *row, dtype=dtype, device=device)
        return cls(**rows)

    def live(self, requests: int, tokens: int) -> Self:
        """Return the first rows of every field, as views.

        Args:
            requests: Rows of fields per request.
            tokens: Rows of fields per token.
        """
        count = {Axis.REQUEST: requests, Axis.TOKEN: tokens}
        return self._map(lambda axis, tensor: tensor[: count[axis]])

    def clone(self) -> Self:
        """Return a copy that stays valid after the next replay."""
        return self._map(lambda _axis, tensor: tensor.clone())

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the fields that are present, by name."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    @classmethod
    def checked(cls, output: Any, requests: int, tokens: int) -> Self:
        """Return the output of a forward after checking it.

        Raises:
            OutputError: The output has the wrong type, a field that this class lacks, or a field
                with the wrong number of rows.
        """
        declared = output_fields_of(cls)
        if not isinstance(output, cls) or len(dataclasses.fields(output)) != len(declared):
            raise OutputError(
                f"the forward returned a {type(output).__name__}. Return {cls._public_name()}."
            )
        count = {Axis.REQUEST: requests, Axis.TOKEN: tokens}
        for name, facts in declared.items():
            tensor = getattr(output, name)
            if tensor is not None or not facts.optional:
                check_rows(name, tensor, {facts.axis.value: count[facts.axis]})
        return output

    @classmethod
    def _public_name(cls) -> str:
        is_own = cls.__module__.startswith("graphkit.")
        return f"graphkit.{cls.__name__}" if is_own else cls.__name__

    def _map(self, change: Callable[[Axis, torch.Tensor], torch.Tensor]) -> Self:
        tensors = self.tensors()
        return type(self)(
            **{
                name: change(facts.axis, tensors[name]) if name in tensors else None
                for name, facts in output_fields_of(type(self)).items()
            }
        )


@dataclass(kw_only=True, eq=False)
class ForwardOutput(Output):
    """Output of a TARGET_VERIFY or DECODE forward. Forwards of draft models may return it, too.

    Shapes:
        next_token_logits: [T, V]. hidden_states: [T, D] with D = ``spec_hidden_size``, if the draft
        model reads them; [T, H] from a draft model.
    """

    next_token_logits: torch.Tensor = declare_output(Axis.TOKEN, row=("V",))
    hidden_states: torch.Tensor | None = declare_output(Axis.TOKEN, row=("D",), optional=True)


@dataclass(kw_only=True, eq=False)
class DraftOutput(Output):
    """Draft tree of each request, as ``graphkit.ops.build_tree`` reads it.

    Shapes:
        parent_list: [B, K * (S - 1) + 1] int64. top_scores_index, draft_tokens: [B, W - 1] int64.
    """

    parent_list: torch.Tensor = declare_output(Axis.REQUEST, torch.int64, row=("P",))
    top_scores_index: torch.Tensor = declare_output(Axis.REQUEST, torch.int64, row=("N",))
    draft_tokens: torch.Tensor = declare_output(Axis.REQUEST, torch.int64, row=("N",))


@dataclass(kw_only=True, eq=False)
class DraftExtendOutput(Output):
    """Output of a draft model that catches up on accepted tokens.

    DRAFT_EXTEND_V2 returns logits and hidden states of each token. It returns no top-k: the worker
    computes it on the rows that it selects.

    Shapes:
        next_token_logits: [T, V]. hidden_states: [T, H], if the draft model returns them.
        topk_p: [B, K] float32. topk_index: [B, K] int64.
    """

    from_draft_model = True

    next_token_logits: torch.Tensor = declare_output(Axis.TOKEN, row=("V",))
    hidden_states: torch.Tensor | None = declare_output(Axis.TOKEN, row=("H",), optional=True)
    topk_p: torch.Tensor | None = declare_output(Axis.REQUEST, row=None, optional=True)
    topk_index: torch.Tensor | None = declare_output(Axis.REQUEST, row=None, optional=True)


@dataclass(kw_only=True, eq=False)
class LastRowOutput(DraftExtendOutput):
    """A ``DraftExtendOutput`` of the last accepted token of each request.

    Shapes:
        next_token_logits: [B, V]. hidden_states: [B, H]. topk_p, topk_index: [B, K].
    """

    next_token_logits: torch.Tensor = declare_output(Axis.REQUEST, row=("V",))
    hidden_states: torch.Tensor | None = declare_output(Axis.REQUEST, row=("H",), optional=True)
    topk_p: torch.Tensor | None = declare_output(
        Axis.REQUEST, torch.float32, row=("K",), optional=True
    )
    topk_index: torch.Tensor | None = declare_output(
        Axis.REQUEST, torch.int64, row=("K",), optional=True
    )


@dataclass(kw_only=True, eq=False)
class LayersOutput(LastRowOutput):
    """A ``LastRowOutput`` of each layer of a chain.

    Shapes:
        next_token_logits: [B, S, V]. hidden_states: [B, S, H], if every layer returns them.
        topk_p, topk_index: [B, S, K].
    """

    next_token_logits: torch.Tensor = declare_output(Axis.REQUEST, row=("S", "V"))
    hidden_states: torch.Tensor | None = declare_output(Axis.REQUEST, row=("S", "H"), optional=True)
    topk_p: torch.Tensor | None = declare_output(
        Axis.REQUEST, torch.float32, row=("S", "K"), optional=True
    )
    topk_index: torch.Tensor | None = declare_output(
        Axis.REQUEST, torch.int64, row=("S", "K"), optional=True
    )


def check_rows(name: str, tensor: Any, allowed: Mapping[str, int]) -> None:
    """Refuse an output field that is not a tensor with one of the allowed numbers of rows.

    Args:
        name: The output field.
        tensor: Its value, as the forward returned it.
        allowed: Numbers of rows, by what has one row each.

    Raises:
        OutputError: The field is not such a tensor.
    """
    if not isinstance(tensor, torch.Tensor) or tensor.ndim < 1:
        raise OutputError(f"the forward returned {name} as {_kind(tensor)}. Return a tensor.")
    if tensor.shape[0] not in allowed.values():
        wanted = " or ".join(f"{count} {what}s" for what, count in allowed.items())
        raise OutputError(
            f"the forward returned {tensor.shape[0]} rows of {name} for {wanted}. "
            "Return one row for each."
        )


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"
