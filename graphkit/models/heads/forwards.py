"""Forwards that connect draft heads to the runners. All of them can be captured."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeGuard, overload

import torch

from graphkit.buffers import (
    DraftContextInputs,
    DraftExtendInputs,
    DraftInputs,
    Inputs,
    TargetVerifyInputs,
)
from graphkit.models.forward import batch_forward
from graphkit.models.heads.dflash import DFlashHead
from graphkit.models.heads.eagle import EagleHead
from graphkit.models.heads.eagle3 import Eagle3Head
from graphkit.models.heads.layers import DraftHead
from graphkit.models.pools import LayerGroupAttention
from graphkit.models.residual import DeferredSums
from graphkit.ops.rows import gather_rows
from graphkit.runners import DraftContextOutput, ForwardOutput


class EagleForward:
    """An EAGLE or EAGLE-3 head in DRAFT, DRAFT_EXTEND and DRAFT_EXTEND_V2.

    Args:
        head: The head.
        attention: The backend that stores its keys and values.
    """

    def __init__(self, head: EagleHead | Eagle3Head, attention: LayerGroupAttention) -> None:
        self._head, self._pooled = head, _PooledHead(head, attention)

    def __call__(self, inputs: DraftInputs | DraftExtendInputs) -> ForwardOutput:
        """Return logits of every row, or of each request's last row in DRAFT_EXTEND."""
        head, rows = self._head, (inputs.input_ids, inputs.hidden_states, inputs.positions)
        with self._pooled.running(inputs):
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

    def __init__(self, head: DFlashHead, attention: LayerGroupAttention) -> None:
        self._head, self._pooled = head, _PooledHead(head, attention)

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
        with self._pooled.running(inputs):
            hidden = self._head(inputs.input_ids, inputs.positions)
        return ForwardOutput(next_token_logits=self._head.logits(hidden))

    def _store_context(self, inputs: DraftContextInputs) -> DraftContextOutput:
        context = self._head.encoder(inputs.hidden_states)
        for layer, (key, value) in enumerate(self._head.context_heads(context, inputs.positions)):
            self._pooled.attention.store(layer, key, value, inputs.out_cache_loc)
        return DraftContextOutput(hidden_states=context)


class _PooledHead:
    """A head and attention over pools of its layers.

    Args:
        head: The head, prepared.
        attention: The backend that stores its keys and values.
    """

    def __init__(self, head: DraftHead, attention: LayerGroupAttention) -> None:
        self.attention, self._layout = attention, head.prepare()
        self._numbers = {
            head.get_submodule(layer.name): (number,)
            for number, layer in enumerate(self._layout.attention)
        }

    @contextmanager
    def running(self, inputs: Inputs) -> Iterator[None]:
        """Let the head attend to the KV pools of a batch in a block."""
        batch = batch_forward(self.attention, self._numbers, inputs)
        with batch.running(), DeferredSums(self._layout.norm_sizes):
            yield


def _needs_last_rows(inputs: Inputs) -> TypeGuard[DraftExtendInputs]:
    """Return whether the mode needs the logits of each request's last row alone."""
    return isinstance(inputs, DraftExtendInputs) and inputs.width is not None


def _last_rows(inputs: Inputs, hidden: torch.Tensor) -> torch.Tensor:
    """Return the rows whose logits the mode needs, so that the output head runs on no others."""
    return gather_rows(hidden, inputs.last_rows()) if _needs_last_rows(inputs) else hidden
