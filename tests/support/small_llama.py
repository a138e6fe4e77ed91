"""A small Llama of transformers with random weights, which attends through any function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from graphkit import models
from graphkit.buffers import DraftExtendInputs
from graphkit.models.running import AttentionCall, attending
from graphkit.ops.rows import gather_rows
from graphkit.runners import ForwardOutput

SIZES = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
    "max_position_embeddings": 96, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": None,
}  # fmt: skip
Attend = Callable[..., torch.Tensor]
"""``attend(layer, query, key, value)``: [T, N, D], [T, M, D] twice, to [T, N, D]."""


def small_llama(
    *,
    seed: int = 3,
    std: float = 0.3,
    device: str = "cpu",
    dtype: Any = None,
    group: Any = None,
    **sizes: Any,
) -> models.TransformersModel:
    """Return a model, in float32 by default, whose texts do not repeat soon."""
    model = LlamaForCausalLM(LlamaConfig(**{**SIZES, **sizes}))
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        parameter.data.normal_(1.0 if "norm" in name else 0.0, std, generator=generator)
    return models.load(model, device=device, dtype=dtype, check=False, group=group)


def hidden_states(
    model: models.TransformersModel, ids: torch.Tensor, positions: torch.Tensor, attend: Attend
) -> torch.Tensor:
    """Run flat tokens [T] up to the output head: [T, H]."""

    def rows(call: AttentionCall) -> torch.Tensor:
        heads = (part[0].transpose(0, 1) for part in (call.query, call.key, call.value))
        return attend(call.module.layer_idx, *heads)[None]

    with attending(rows, positions):
        out = model.model.get_decoder()(
            input_ids=ids[None], position_ids=positions[None], use_cache=False
        )
    return out.last_hidden_state[0]


def full_logits(model: models.TransformersModel, ids: torch.Tensor) -> torch.Tensor:
    """Return the logits of whole texts [B, L] without a cache: [B, L, V]."""
    with torch.no_grad():
        return model.original(ids, use_cache=False).logits


def target_features(
    model: models.TransformersModel, ids: torch.Tensor, aux_layers: Sequence[int] = ()
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what a head reads of a text [T], without a cache, and the logits [T, V].

    These are the inputs of ``aux_layers`` side by side, or the rows of the output head.
    """
    last: list[torch.Tensor] = []
    norm = model.original.get_decoder().norm
    hook = norm.register_forward_pre_hook(lambda _module, args: last.append(args[0]))
    try:
        with torch.no_grad():
            out = model.original(ids[None], output_hidden_states=True, use_cache=False)
    finally:
        hook.remove()
    streams = [*out.hidden_states[:-1], last[0]]
    if not aux_layers:
        return out.hidden_states[-1][0], out.logits[0]
    return torch.cat([streams[layer][0] for layer in aux_layers], -1), out.logits[0]


class LlamaForward:
    """The model in TARGET_VERIFY and DECODE.

    Args:
        model: The model.
        attention: Any backend with ``attend``.
    """

    def __init__(self, model: models.TransformersModel, attention: Any) -> None:
        self._model, self._attention = model, attention

    def __call__(self, inputs: Any) -> ForwardOutput:
        hidden = self._hidden(inputs)
        return ForwardOutput(next_token_logits=self._model.head(hidden), hidden_states=hidden)

    def _hidden(self, inputs: Any, first_layer: int = 0) -> torch.Tensor:
        def attend(layer: int, *heads: torch.Tensor) -> torch.Tensor:
            slots, metadata = inputs.out_cache_loc, inputs.attention
            return self._attention.attend(first_layer + layer, *heads, slots, metadata)

        return hidden_states(self._model, inputs.input_ids, inputs.positions, attend)


class StandaloneForward(LlamaForward):
    """The model as a draft model."""

    def __call__(self, inputs: Any) -> ForwardOutput:
        hidden = self._hidden(inputs)
        if isinstance(inputs, DraftExtendInputs) and inputs.width is not None:
            hidden = gather_rows(hidden, inputs.last_rows())
        return ForwardOutput(next_token_logits=self._model.head(hidden))
