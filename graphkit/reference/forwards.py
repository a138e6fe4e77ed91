"""The reference models as forwards of the runners: what a user of graphkit writes. Capturable."""

from __future__ import annotations

import torch

from graphkit.attention import PagedAttention
from graphkit.buffers import (
    DraftExtendInputs,
    DraftInputs,
    Inputs,
    MultiLayerDraftExtendInputs,
    TargetVerifyInputs,
)
from graphkit.reference.eagle import EagleHead
from graphkit.reference.layers import Attend
from graphkit.reference.model import LlamaModel
from graphkit.reference.mtp import MTPHead
from graphkit.runners import ForwardOutput


class VerifyForward:
    """A Llama-layout model in TARGET_VERIFY and DECODE.

    Args:
        model: The target.
        attention: The backend that keeps its keys and values.
    """

    def __init__(self, model: LlamaModel, attention: PagedAttention) -> None:
        self._model, self._attention = model, attention

    def __call__(self, inputs: TargetVerifyInputs) -> ForwardOutput:
        """Score every row."""
        hidden = self._model(
            inputs.input_ids,
            inputs.positions,
            _attend(self._attention, inputs),
            input_embeds=inputs.input_embeds,
        )
        return ForwardOutput(next_token_logits=self._model.logits(hidden), hidden_states=hidden)


class EagleForward:
    """An Eagle head in DRAFT, DRAFT_EXTEND and DRAFT_EXTEND_V2.

    Args:
        head: The head.
        attention: The backend that keeps its keys and values.
    """

    def __init__(self, head: EagleHead, attention: PagedAttention) -> None:
        self._head, self._attention = head, attention

    def __call__(self, inputs: DraftInputs | DraftExtendInputs) -> ForwardOutput:
        """Predict from every row, or from each request's last one where rows vary."""
        hidden = self._head(
            inputs.input_ids,
            inputs.hidden_states,
            inputs.positions,
            _attend(self._attention, inputs),
        )
        hidden = _last_of_varying(inputs, hidden)
        return ForwardOutput(next_token_logits=self._head.logits(hidden), hidden_states=hidden)


class MTPForward:
    """One layer of a multi-layer Eagle chain.

    Args:
        head: The chain.
        layer: Which of its layers, from 0.
        attention: The backend that keeps the keys and values of all layers.
    """

    def __init__(self, head: MTPHead, layer: int, attention: PagedAttention) -> None:
        self._head, self._layer, self._attention = head, layer, attention

    def __call__(self, inputs: MultiLayerDraftExtendInputs) -> ForwardOutput:
        """Predict from each request's selected row; hidden states of every row."""
        hidden = self._head(
            self._layer,
            inputs.input_ids,
            inputs.hidden_states,
            inputs.positions,
            _attend(self._attention, inputs),
        )
        chosen = hidden.index_select(0, inputs.select_index)
        logits = self._head.logits(self._layer, chosen)
        return ForwardOutput(next_token_logits=logits, hidden_states=hidden)


class StandaloneForward:
    """A small language model of its own as the draft model.

    Args:
        model: The draft model, with the target's vocabulary.
        attention: The backend that keeps its keys and values.
    """

    def __init__(self, model: LlamaModel, attention: PagedAttention) -> None:
        self._model, self._attention = model, attention

    def __call__(self, inputs: DraftInputs | DraftExtendInputs) -> ForwardOutput:
        """Predict from every row, or from each request's last one where rows vary."""
        attend = _attend(self._attention, inputs)
        hidden = self._model(inputs.input_ids, inputs.positions, attend)
        hidden = _last_of_varying(inputs, hidden)
        return ForwardOutput(next_token_logits=self._model.logits(hidden))


def _attend(attention: PagedAttention, inputs: Inputs) -> Attend:
    metadata, slots = inputs.attention, inputs.out_cache_loc
    assert metadata is not None, "the runner was given this attention backend"

    def attend(
        layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        return attention.attend(layer, query, key, value, slots, metadata)

    return attend


def _last_of_varying(inputs: Inputs, hidden: torch.Tensor) -> torch.Tensor:
    """The rows that v1 asks for; so the head of the model runs on no row in vain."""
    if isinstance(inputs, DraftExtendInputs) and inputs.width is not None:
        return hidden.index_select(0, inputs.last_rows())
    return hidden
