"""Outputs of forwards and runners, and their live rows.

From a replay, every tensor aliases graph memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch

from graphkit.buffers import Axis
from graphkit.config import BufferSizes
from graphkit.errors import OutputError
from graphkit.runners.output_fields import (
    OutputCheck,
    OutputRow,
    declare_output,
    declared_outputs,
    output_rows,
)
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
        rows = {
            name: torch.empty(0, *row.shape, dtype=row.dtype or sizes.dtype, device=device)
            for name, row in cls.rows(spec, sizes).items()
        }
        return cls(**rows)

    @classmethod
    def rows(cls, spec: SpecConfig, sizes: BufferSizes) -> dict[str, OutputRow]:
        """Return the rows of each field that declares them, by name.

        Raises:
            ConfigError: A declaration names an unknown letter.
        """
        fields = declared_outputs(cls)
        return output_rows(fields, spec, sizes, is_draft=cls.from_draft_model)

    def live(self, requests: int, tokens: int) -> Self:
        """Return the first rows of every field, as views.

        Args:
            requests: Rows of fields per request.
            tokens: Rows of fields per token.
        """
        count = {Axis.REQUEST: requests, Axis.TOKEN: tokens, Axis.NONE: 1}
        return self._map(lambda axis, tensor: tensor[: count[axis]])

    def clone(self) -> Self:
        """Return a copy that stays valid after the next replay."""
        return self._map(lambda _axis, tensor: tensor.clone())

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the fields that are present, by name."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    @classmethod
    def checked(
        cls,
        output: Any,
        requests: int,
        tokens: int,
        check: OutputCheck | None = None,
        logit_rows: torch.Tensor | None = None,
    ) -> Self:
        """Return the output of a forward after checking it.

        Args:
            output: What the forward returned.
            requests: Rows of fields per request.
            tokens: Rows of fields per token.
            check: Checks each field; ``None`` checks the number of rows alone.
            logit_rows: See ``StepInputs``.

        Raises:
            OutputError: The output has the wrong type, a field that this class lacks, or a field
                with the wrong number of rows, shape of a row or dtype.
        """
        declared, check = declared_outputs(cls), check or OutputCheck()
        if not isinstance(output, cls) or len(dataclasses.fields(output)) != len(declared):
            raise OutputError(
                f"{check.forward} returned a {type(output).__name__}. Return {cls._public_name()}."
            )
        count = {Axis.REQUEST: requests, Axis.TOKEN: tokens, Axis.NONE: 1}
        for name, facts in declared.items():
            tensor = getattr(output, name)
            if tensor is not None or not facts.optional:
                allowed = {facts.axis.value: count[facts.axis]}
                if name == "next_token_logits" and logit_rows is not None:
                    allowed["row of logit_rows"] = len(logit_rows)
                check.check_field(name, tensor, allowed)
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
                for name, facts in declared_outputs(type(self)).items()
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
class DraftContextOutput(Output):
    """Output of a DFLASH draft model for ``DraftContextInputs``, whose keys and values it stores.

    Shapes:
        hidden_states: [T, H], what keys and values are projected from.
    """

    hidden_states: torch.Tensor = declare_output(Axis.TOKEN, row=("H",))


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
