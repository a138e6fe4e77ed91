"""The forward of a transformers model over graphkit's pools, as runners and engines call it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from graphkit.buffers import TargetVerifyInputs
from graphkit.hf.attention import AttentionCall, attending
from graphkit.hf.layout import ModelLayout, output_head
from graphkit.hf.pools import LayerGroupAttention
from graphkit.hf.recurrent import NodeScan, scanning
from graphkit.kv import RecurrentStatePool
from graphkit.runners import ForwardOutput


class TransformersForward:
    """Runs a transformers model on the rows of a batch.

    Args:
        model: The model, prepared by ``prepare_model``.
        layout: Its layers with state.
        attention: Attention over KV pools of these layers.
        states: States of the recurrent layers; ``None`` without such layers.
        aux_layers: Decoder layers whose inputs are the hidden states, side by side; empty for the
            rows that the head of the model receives.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        layout: ModelLayout,
        attention: LayerGroupAttention,
        states: RecurrentStatePool | None = None,
        aux_layers: Sequence[int] = (),
    ) -> None:
        self.model, self._attention, self._states = model, attention, states
        modules = dict(model.named_modules())
        self._layer_numbers = {
            modules[layer.name]: number for number, layer in enumerate(layout.attention)
        }
        self._observed = [decoder_layers(model)[layer] for layer in aux_layers] or [
            output_head(model)
        ]

    def __call__(self, inputs: TargetVerifyInputs) -> ForwardOutput:
        """Return logits [T, V] and hidden states [T, H], H per layer of ``aux_layers``."""
        hidden: list[torch.Tensor] = []

        def observe(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hidden.append(args[0] if args else kwargs["hidden_states"])

        def attend(call: AttentionCall) -> torch.Tensor:
            number, metadata = self._layer_numbers[call.module], inputs.attention
            assert metadata is not None, "a runner sets it"
            return self._attention.attend(number, call, inputs.out_cache_loc, metadata)

        with ExitStack() as stack:
            for module in self._observed:
                hook = module.register_forward_pre_hook(observe, with_kwargs=True)
                stack.callback(hook.remove)
            stack.enter_context(attending(attend))
            if self._states is not None:
                scan = NodeScan(self._states, self._states.slots(inputs))
                stack.enter_context(scanning(scan))
            out = self.model(
                input_ids=inputs.input_ids[None],
                position_ids=inputs.positions[None],
                use_cache=False,
            )
        return ForwardOutput(
            next_token_logits=out.logits[0], hidden_states=torch.cat(hidden, -1)[0]
        )


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """Return the list of a model's decoder layers."""
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    return next(
        each for each in model.modules() if isinstance(each, nn.ModuleList) and len(each) == count
    )
