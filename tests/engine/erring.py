"""A target that labels its hidden states, and a draft model that errs where the labels say so."""

from __future__ import annotations

from typing import Any

import torch

from graphkit.attention import PagedAttention
from graphkit.reference import LlamaModel, VerifyForward
from graphkit.runners import ForwardOutput


def label_of(tokens: torch.Tensor, positions: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Hidden states, in the shape of ``like``, that say which token stands where."""
    named = torch.stack((tokens, positions), 1).to(like.dtype)
    return torch.nn.functional.pad(named, (0, like.shape[1] - 2))


def misled(logits: torch.Tensor, label: torch.Tensor, topk: int) -> torch.Tensor:
    """Logits whose best token changes places with one of lower rank, in a third of all places.

    In a sixth it is out of the K best, in another sixth the last of them. Which places those are is
    read off the label: a hidden state that went astray errs elsewhere.
    """
    kind = (3 * label[:, 0] + 5 * label[:, 1]).long() % 6
    rank = torch.where(kind == 0, topk, torch.where(kind == 1, topk - 1, 0))[:, None]
    values, tokens = logits.topk(topk + 1)
    logits = logits.scatter(1, tokens[:, :1], values.gather(1, rank))
    return logits.scatter(1, tokens.gather(1, rank), values[:, :1])


class LabellingForward(VerifyForward):
    """The target, but its hidden states are labels."""

    def __call__(self, inputs: Any) -> ForwardOutput:
        output = super().__call__(inputs)
        assert output.hidden_states is not None, "the target makes some"
        label = label_of(inputs.input_ids, inputs.positions, output.hidden_states)
        return ForwardOutput(next_token_logits=output.next_token_logits, hidden_states=label)


class ErringForward:
    """The target's weights as a draft model: nearly always right, but for what misleads it.

    Fed with hidden states, it reads its labels off them; else it labels its rows itself.

    Args:
        layer: Which link of a chain of such models it is, whose KV layers lie one after the other.
    """

    def __init__(
        self, model: LlamaModel, attention: PagedAttention, topk: int, layer: int = 0
    ) -> None:
        self._model, self._attention, self._topk = model, attention, topk
        self._first_layer = layer * model.config.num_hidden_layers

    def __call__(self, inputs: Any) -> ForwardOutput:
        def attend(layer: int, *qkv: torch.Tensor) -> torch.Tensor:
            layer += self._first_layer
            return self._attention.attend(layer, *qkv, inputs.out_cache_loc, inputs.attention)

        hidden = self._model(inputs.input_ids, inputs.positions, attend)
        logits, fed = self._model.logits(hidden), inputs.hidden_states
        if fed is None:
            label = label_of(inputs.input_ids, inputs.positions, hidden)
            return ForwardOutput(next_token_logits=misled(logits, label, self._topk))
        return ForwardOutput(
            next_token_logits=misled(logits, fed, self._topk),
            hidden_states=label_of(inputs.input_ids, fed[:, 1] + 1, hidden),
        )
