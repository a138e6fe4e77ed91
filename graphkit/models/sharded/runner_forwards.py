"""Forwards that connect the reference models to the runners. All of them can be captured."""

from __future__ import annotations

from collections.abc import Sequence

from graphkit.buffers import (
    DraftExtendInputs,
    DraftInputs,
    MultiLayerDraftExtendInputs,
    TargetVerifyInputs,
)
from graphkit.engine.attention import PagedAttention
from graphkit.models.heads.forwards import _attend, _last_rows
from graphkit.models.heads.mtp_chain import MTPHead
from graphkit.models.heads.sources import AuxStates
from graphkit.models.sharded.model import LlamaModel
from graphkit.ops.rows import gather_rows
from graphkit.runners import ForwardOutput


class VerifyForward:
    """A Llama-layout model in TARGET_VERIFY and DECODE.

    Args:
        model: The target.
        attention: The backend that stores its keys and values.
        aux_layers: Layers whose inputs an EAGLE-3 head reads; see ``AuxStates``.
    """

    def __init__(
        self, model: LlamaModel, attention: PagedAttention, aux_layers: Sequence[int] = ()
    ) -> None:
        self._model, self._attention, self._aux_layers = model, attention, tuple(aux_layers)

    def __call__(self, inputs: TargetVerifyInputs) -> ForwardOutput:
        """Return logits and hidden states of every row, [T, H], or [T, 3 H] for EAGLE-3."""
        aux = AuxStates(self._aux_layers)
        hidden = self._model(
            inputs.input_ids,
            inputs.positions,
            _attend(self._attention, inputs, self._model.config),
            input_embeds=inputs.input_embeds,
            aux=aux,
        )
        return ForwardOutput(
            next_token_logits=self._model.logits(hidden),
            hidden_states=aux.joined() if self._aux_layers else hidden,
        )


class MTPForward:
    """One layer of a multi-layer EAGLE chain, in MULTI_LAYER_EAGLE.

    Args:
        head: The chain.
        layer: Index of the layer, from 0.
        attention: The backend that stores the keys and values of all layers.
    """

    def __init__(self, head: MTPHead, layer: int, attention: PagedAttention) -> None:
        self._head, self._layer, self._attention = head, layer, attention

    def __call__(self, inputs: MultiLayerDraftExtendInputs) -> ForwardOutput:
        """Return logits of each request's selected row and hidden states of every row."""
        hidden = self._head(
            self._layer,
            inputs.input_ids,
            inputs.hidden_states,
            inputs.positions,
            _attend(self._attention, inputs, self._head.config),
        )
        selected = gather_rows(hidden, inputs.select_index)
        logits = self._head.logits(self._layer, selected)
        return ForwardOutput(next_token_logits=logits, hidden_states=hidden)


class StandaloneForward:
    """A small language model as the draft model, in DRAFT, DRAFT_EXTEND and DRAFT_EXTEND_V2.

    Args:
        model: The draft model, with the target's vocabulary.
        attention: The backend that stores its keys and values.
    """

    def __init__(self, model: LlamaModel, attention: PagedAttention) -> None:
        self._model, self._attention = model, attention

    def __call__(self, inputs: DraftInputs | DraftExtendInputs) -> ForwardOutput:
        """Return logits of every row, or of each request's last row in DRAFT_EXTEND."""
        attend = _attend(self._attention, inputs, self._model.config)
        hidden = self._model(inputs.input_ids, inputs.positions, attend)
        hidden = _last_rows(inputs, hidden)
        return ForwardOutput(next_token_logits=self._model.logits(hidden))
