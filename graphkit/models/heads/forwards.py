"""Forwards that connect draft heads to the runners. All of them can be captured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeGuard, overload

import torch

from graphkit.buffers import (
    AttentionMetadata,
    DraftContextInputs,
    DraftExtendInputs,
    DraftInputs,
    Inputs,
    TargetVerifyInputs,
)
from graphkit.engine.attention import PagedAttention, ProjectedHeads
from graphkit.models.heads.config import LayerConfig
from graphkit.models.heads.dflash import DFlashHead
from graphkit.models.heads.eagle import EagleHead
from graphkit.models.heads.eagle3 import Eagle3Head
from graphkit.models.heads.layers import Attend
from graphkit.ops.rows import gather_rows
from graphkit.runners import DraftContextOutput, ForwardOutput


class EagleForward:
    """An EAGLE or EAGLE-3 head in DRAFT, DRAFT_EXTEND and DRAFT_EXTEND_V2.

    Args:
        head: The head.
        attention: The backend that stores its keys and values.
    """

    def __init__(self, head: EagleHead | Eagle3Head, attention: PagedAttention) -> None:
        self._head, self._attention = head, attention

    def __call__(self, inputs: DraftInputs | DraftExtendInputs) -> ForwardOutput:
        """Return logits of every row, or of each request's last row in DRAFT_EXTEND."""
        head, attend = self._head, _attend(self._attention, inputs, self._head.config)
        rows = inputs.input_ids, inputs.hidden_states, inputs.positions, attend
        if isinstance(head, Eagle3Head) and not _needs_last_rows(inputs):
            logits, hidden = head(*rows, with_logits=True)
        else:
            hidden = _last_rows(inputs, head(*rows))
            logits = head.logits(hidden)
        return ForwardOutput(next_token_logits=logits, hidden_states=hidden)


class DFlashForward:
    """A DFLASH head: blocks in TARGET_VERIFY, and the context that they attend to.

    Args:
        head: The head.
        attention: The backend whose KV pool has the keys and values of context and blocks.
    """

    def __init__(self, head: DFlashHead, attention: PagedAttention) -> None:
        self._head, self._attention = head, attention

    @overload
    def __call__(self, inputs: TargetVerifyInputs) -> ForwardOutput: ...

    @overload
    def __call__(self, inputs: DraftContextInputs) -> DraftContextOutput: ...

    def __call__(
        self, inputs: TargetVerifyInputs | DraftContextInputs
    ) -> ForwardOutput | DraftContextOutput:
        """Return logits of every row of a block, or store the keys and values of a context."""
        if isinstance(inputs, DraftContextInputs):
            return self._store_context(inputs)
        hidden = self._head(
            inputs.input_ids,
            inputs.positions,
            _attend(self._attention, inputs, self._head.config),
        )
        return ForwardOutput(next_token_logits=self._head.logits(hidden))

    def _store_context(self, inputs: DraftContextInputs) -> DraftContextOutput:
        context = self._head.encoder(inputs.hidden_states)
        for layer, (key, value) in enumerate(self._head.context_heads(context, inputs.positions)):
            self._attention.store(layer, key, value, inputs.out_cache_loc)
        return DraftContextOutput(hidden_states=context)


@dataclass(frozen=True, slots=True, eq=False)
class _BatchAttention:
    """Attends in the layers of a model during one forward of a batch.

    Attributes:
        attention: A backend; one without ``attend_projected`` gets rotated heads.
        slots: Slots of the rows.
        metadata: Metadata of the batch.
        window: Most keys that a row sees; 0 for all.
    """

    attention: Any
    slots: torch.Tensor
    metadata: AttentionMetadata
    window: int

    def __call__(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Store keys and values, and attend."""
        attended: torch.Tensor = self.attention.attend(
            layer, query, key, value, self.slots, self.metadata, window=self.window
        )
        return attended

    def projected(self, layer: int, heads: ProjectedHeads) -> torch.Tensor:
        """Rotate heads, store keys and values, and attend."""
        if not hasattr(self.attention, "attend_projected"):
            return self(layer, *heads.rotated())
        attended: torch.Tensor = self.attention.attend_projected(
            layer, heads, self.slots, self.metadata, window=self.window
        )
        return attended


def _attend(attention: PagedAttention, inputs: Inputs, config: LayerConfig) -> Attend:
    assert inputs.attention is not None, "the runner has an attention backend"
    window = config.sliding_window or 0
    return _BatchAttention(attention, inputs.out_cache_loc, inputs.attention, window)


def _needs_last_rows(inputs: Inputs) -> TypeGuard[DraftExtendInputs]:
    """Return whether the mode needs the logits of each request's last row alone."""
    return isinstance(inputs, DraftExtendInputs) and inputs.width is not None


def _last_rows(inputs: Inputs, hidden: torch.Tensor) -> torch.Tensor:
    """Return the rows whose logits the mode needs, so that the output head runs on no others."""
    return gather_rows(hidden, inputs.last_rows()) if _needs_last_rows(inputs) else hidden
