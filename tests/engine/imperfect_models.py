"""A target whose hidden states are labels, and a draft model that errs depending on them."""

from __future__ import annotations

from typing import Any

import torch

from graphkit.engine.attention import PagedAttention
from graphkit.models import TransformersModel
from graphkit.runners import ForwardOutput
from small_llama import LlamaForward


def labels_of(tokens: torch.Tensor, positions: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return hidden states, shaped as ``like``, that contain each row's token and position."""
    labels = torch.stack((tokens, positions), 1).to(like.dtype)
    return torch.nn.functional.pad(labels, (0, like.shape[1] - 2))


def with_errors(logits: torch.Tensor, labels: torch.Tensor, topk: int) -> torch.Tensor:
    """Return logits whose best token is swapped with one of lower rank, in a third of all rows.

    In a sixth of the rows it is not among the K best, in another sixth the last of them. The labels
    determine the rows, so that a hidden state of a wrong row causes different errors.
    """
    kind = (3 * labels[:, 0] + 5 * labels[:, 1]).long() % 6
    rank = torch.where(kind == 0, topk, torch.where(kind == 1, topk - 1, 0))[:, None]
    values, tokens = logits.topk(topk + 1)
    logits = logits.scatter(1, tokens[:, :1], values.gather(1, rank))
    return logits.scatter(1, tokens.gather(1, rank), values[:, :1])


class LabellingForward(LlamaForward):
    """The target, with labels as hidden states.

    Args:
        num_layers: Target layers whose hidden states the draft model reads, as in EAGLE-3.
    """

    def __init__(
        self, model: TransformersModel, attention: PagedAttention, num_layers: int = 1
    ) -> None:
        super().__init__(model, attention)
        self._num_layers = num_layers

    def __call__(self, inputs: Any) -> ForwardOutput:
        output = super().__call__(inputs)
        assert output.hidden_states is not None, "the target returns hidden states"
        like = output.hidden_states.repeat(1, self._num_layers)
        labels = labels_of(inputs.input_ids, inputs.positions, like)
        return ForwardOutput(next_token_logits=output.next_token_logits, hidden_states=labels)


class ErringForward(LlamaForward):
    """A draft model with the target's weights and with errors that its labels determine.

    The labels are its input hidden states or, without these, its own tokens and positions.

    Args:
        layer: Index in a chain of such models, which share a KV pool of consecutive layers.
        token_map: Tokens that it can draft, as in EAGLE-3; ``None`` for all.
    """

    def __init__(
        self,
        model: TransformersModel,
        attention: PagedAttention,
        topk: int,
        layer: int = 0,
        token_map: torch.Tensor | None = None,
    ) -> None:
        super().__init__(model, attention)
        self._topk = topk
        self._token_map = token_map
        self._first_layer = layer * len(model.layout.attention)

    def __call__(self, inputs: Any) -> ForwardOutput:
        hidden = self._hidden(inputs, self._first_layer)
        labels, next_labels = inputs.hidden_states, None
        if labels is None:
            labels = labels_of(inputs.input_ids, inputs.positions, hidden)
        else:
            next_labels = labels_of(inputs.input_ids, labels[:, 1] + 1, hidden)
        logits = with_errors(self._model.head(hidden), labels, self._topk)
        if self._token_map is not None:
            logits = logits.index_select(1, self._token_map)
        return ForwardOutput(next_token_logits=logits, hidden_states=next_labels)
