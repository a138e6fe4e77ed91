"""The forward of a transformers model over graphkit's pools, as runners and engines call it."""

from __future__ import annotations

from contextlib import ExitStack

import torch
from transformers import PreTrainedModel

from graphkit.buffers import TargetVerifyInputs
from graphkit.hf.attention import AttentionCall, attending
from graphkit.hf.fusion.residual import DeferredSums
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
    """

    def __init__(
        self,
        model: PreTrainedModel,
        layout: ModelLayout,
        attention: LayerGroupAttention,
        states: RecurrentStatePool | None = None,
    ) -> None:
        self.model, self._attention, self._states = model, attention, states
        modules = dict(model.named_modules())
        self._layer_numbers = {
            modules[layer.name]: number for number, layer in enumerate(layout.attention)
        }
        self._head, self._norm_sizes = output_head(model), layout.norm_sizes

    def __call__(self, inputs: TargetVerifyInputs) -> ForwardOutput:
        """Return logits [T, V], and the hidden states that the head receives, [T, H]."""
        hidden: list[torch.Tensor] = []

        def attend(call: AttentionCall) -> torch.Tensor:
            number, metadata = self._layer_numbers[call.module], inputs.attention
            assert metadata is not None, "a runner sets it"
            return self._attention.attend(number, call, inputs.out_cache_loc, metadata)

        with ExitStack() as stack:
            hook = self._head.register_forward_pre_hook(lambda _, args: hidden.append(args[0]))
            stack.callback(hook.remove)
            stack.enter_context(attending(attend, inputs.positions))
            if self._norm_sizes:
                stack.enter_context(DeferredSums(self._norm_sizes))
            if self._states is not None:
                scan = NodeScan(self._states, self._states.slots(inputs))
                stack.enter_context(scanning(scan))
            out = self.model(
                input_ids=inputs.input_ids[None],
                position_ids=inputs.positions[None],
                use_cache=False,
            )
        return ForwardOutput(next_token_logits=out.logits[0], hidden_states=hidden[0][0])
