"""Attention of transformers models, through its registry, and their forward over graphkit's pools.

Suffixes: T rows, N query heads, M key-value heads, D head size of keys, E head size of values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from threading import get_ident
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel

from graphkit.buffers import Inputs
from graphkit.engine.kv import RecurrentStatePool
from graphkit.errors import ConfigError
from graphkit.models.layout import ModelLayout, decoder_layers, output_head
from graphkit.models.pools import LayerGroupAttention
from graphkit.models.residual import DeferredSums
from graphkit.models.running import (
    AttentionCall,
    NodeScan,
    RunningForward,
    SelectedKeys,
    running_forward,
)
from graphkit.ops.rows import gather_rows
from graphkit.runners import ForwardOutput

IMPLEMENTATION = "graphkit"
"""Name of the attention in the registry of transformers."""

WITHOUT_EFFECT = frozenset({
    "cache_position", "cu_seq_lens_k", "cu_seq_lens_q", "is_causal", "max_length_k", "max_length_q",
    "output_attentions", "output_hidden_states", "output_router_logits", "position_ids",
    "use_cache",
})  # fmt: skip
"""Arguments that transformers passes on to attention, and that change nothing in a causal layer."""


def attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    indices: SelectedKeys | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attend in one layer; the signature is that of the registry.

    Raises:
        AttentionError: The model runs outside of a forward of graphkit.
        ConfigError: The layer attends to other keys than those of its rows.
    """
    attend = running_forward().attend
    if key.shape[2] not in (1, query.shape[2]):  # 1 beside latents, see ``LatentCache``
        raise ConfigError(
            f"{type(module).__name__} passes {key.shape[2]} keys of {query.shape[2]} rows to its "
            "attention: graphkit keeps one key per row and layer.",
            field="folder_or_model",
        )
    unknown = {name: value for name, value in others.items() if name not in WITHOUT_EFFECT}
    unknown |= {"attention_mask": attention_mask, "dropout": dropout}
    unknown["is_causal=False"] = others.get("is_causal") is False
    chunk = _chunk_size(module)
    call = AttentionCall(
        module=module,
        query=query,
        key=key,
        value=value,
        scaling=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        window=chunk or sliding_window or 0,
        chunked=chunk > 0,
        softcap=softcap or 0.0,
        sinks=s_aux,
        selected=indices,
        others={name: value for name, value in unknown.items() if _has_effect(value)},
    )
    return attend(call), None


def _chunk_size(module: Any) -> int:
    """Return the tokens of a chunk in a layer that attends in chunks, else 0.

    transformers tells a layer its window, but applies chunks by a mask, which it makes from these
    settings.
    """
    config = getattr(module, "config", None)
    layer_types = getattr(config, "layer_types", None) or ()
    index = getattr(module, "layer_idx", None)
    if index is None or "chunked_attention" not in layer_types[index : index + 1]:
        return 0
    size: int = config.attention_chunk_size  # type: ignore[union-attr]
    return size


def _has_effect(value: Any) -> bool:
    # A mask of one element hides no key.
    return value.numel() > 1 if isinstance(value, torch.Tensor) else bool(value)


AttentionInterface.register(IMPLEMENTATION, attention)


def batch_forward(
    attention: LayerGroupAttention,
    numbers: Mapping[nn.Module, Sequence[int]],
    inputs: Inputs,
    states: RecurrentStatePool | None = None,
    first_indexer: int = 0,
    selected: Mapping[int, SelectedKeys] = MappingProxyType({}),
) -> RunningForward:
    """Return what the layers of a model use of a batch during one forward.

    Args:
        attention: Attention over the pools of the layers.
        numbers: Index of each call that a module makes of the attention, in order.
        inputs: The batch.
        states: States of the recurrent layers; ``None`` without such layers.
        first_indexer: Indexers of the pools before those of the model.
        selected: The keys that the rows see in some layers, by index.
    """
    metadata, slots = inputs.attention, inputs.out_cache_loc
    assert metadata is not None, "a runner sets it"
    left = {module: iter(indices) for module, indices in numbers.items()}

    def attend(call: AttentionCall) -> torch.Tensor:
        layer = next(left[call.module])
        if layer in selected:
            call = replace(call, selected=selected[layer])
        return attention.attend(layer, call, slots, metadata)

    return RunningForward(
        attend,
        inputs.positions,
        scan=None if states is None else NodeScan(states, inputs),
        index=attention.index_batch(slots, metadata, first_indexer),
        slots=slots,
    )


class TransformersForward:
    """Runs a transformers model on the rows of a batch.

    Args:
        model: The model, prepared by ``prepare_model``.
        layout: Its layers with state.
        attention: Attention over KV pools of these layers.
        states: States of the recurrent layers; ``None`` without such layers.
        aux_layers: Layers whose inputs a draft head reads: layer i, from 0 to n - 1; n stands for
            the end of the last layer, before the final norm.
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
        self._layer_numbers: dict[nn.Module, list[int]] = {}
        for number, layer in enumerate(layout.attention):
            self._layer_numbers.setdefault(modules[layer.name], []).append(number)
        self._head, self._aux_layers = output_head(model), tuple(aux_layers)
        self._layers = list(decoder_layers(model, layout)) if aux_layers else []
        self._norm_sizes = layout.norm_sizes

    def __call__(self, inputs: Inputs) -> ForwardOutput:
        """Return logits, [T, V] or those of ``logit_rows``, and hidden states.

        Hidden states are the rows that the head receives, [T, H], or the inputs of ``aux_layers``
        side by side, [T, layers x H].
        """
        hidden: list[torch.Tensor] = []
        aux: dict[int, torch.Tensor] = {}
        thread = get_ident()  # hooks also see the forwards of other threads: modules may be shared

        def head(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
            if get_ident() != thread:
                return None
            hidden.append(args[0])
            if inputs.logit_rows is None:
                return None
            return gather_rows(args[0][0], inputs.logit_rows)[None], *args[1:]

        with ExitStack() as stack:
            stack.callback(self._head.register_forward_pre_hook(head).remove)
            self._record(aux, stack)
            batch = batch_forward(self._attention, self._layer_numbers, inputs, self._states)
            stack.enter_context(batch.running())
            if self._norm_sizes:
                stack.enter_context(DeferredSums(self._norm_sizes))
            out = self.model(
                input_ids=inputs.input_ids[None],
                position_ids=inputs.positions[None],
                use_cache=False,
            )
        streams = [aux[layer] for layer in self._aux_layers]
        return ForwardOutput(
            next_token_logits=out.logits[0],
            hidden_states=(torch.cat(streams, -1) if streams else hidden[0])[0],
        )

    def _record(self, aux: dict[int, torch.Tensor], stack: ExitStack) -> None:
        """Record the inputs of layers, and the output of the last one, until the stack closes."""
        thread = get_ident()

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if get_ident() == thread:
                aux[self._layers.index(module)] = args[0] if args else kwargs["hidden_states"]

        def after(_module: nn.Module, _args: Any, output: Any) -> None:
            if get_ident() == thread:
                aux[len(self._layers)] = output if isinstance(output, torch.Tensor) else output[0]

        for number in set(self._aux_layers):
            if number == len(self._layers):
                hook = self._layers[-1].register_forward_hook(after)
            else:
                hook = self._layers[number].register_forward_pre_hook(before, with_kwargs=True)
            stack.callback(hook.remove)
