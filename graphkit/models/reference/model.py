"""A Llama-layout language model over flat tokens. The caller provides attention.

Tensor suffixes: B requests, L tokens of each, T tokens, S parts of a product, H hidden,
V vocabulary, N query heads, M key and value heads, D head dim.
"""
# ruff: noqa: N803, N806 -- the suffixes are shapes

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from graphkit.errors import InputError
from graphkit.models.quantization import Linear
from graphkit.models.reference.config import LlamaConfig
from graphkit.models.reference.layers import Attend, DecoderLayer, Embedding, RMSNorm
from graphkit.models.reference.rope import RotaryEmbedding, Rotation


class AuxStates:
    """Residual streams inside a model, recorded in a forward: what an EAGLE-3 head reads.

    Args:
        layers: Numbers of layers. The stream is recorded before layer i, i from 0 to n - 1; n
            stands for the end of the last layer, before the final norm.
    """

    def __init__(self, layers: Sequence[int]) -> None:
        self._layers = tuple(layers)
        self._states: dict[int, Tensor] = {}

    def record(self, layer: int, hidden_TH: Tensor) -> None:
        """Keep the stream before a layer if it is wanted."""
        if layer in self._layers:
            self._states[layer] = hidden_TH

    def joined(self) -> Tensor:
        """Return the streams side by side, [T, layers x H]."""
        return torch.cat([self._states[layer] for layer in self._layers], dim=-1)


class LlamaDecoder(nn.Module):
    """Embedding, decoder layers and final norm: the ``model.`` prefix of Hugging Face."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            DecoderLayer(config, layer) for layer in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = RotaryEmbedding(config)

    def forward(
        self, hidden_TH: Tensor, positions_T: Tensor, attend: Attend, aux: AuxStates | None = None
    ) -> Tensor:
        """Run all layers and the final norm over embedded tokens, [T, H] to [T, H]."""
        rotation = self.rotary_emb(positions_T)
        return run_layers(self.layers, self.norm, hidden_TH, rotation, attend, aux)


def run_layers(
    layers: nn.ModuleList,
    final_norm: RMSNorm,
    hidden_TH: Tensor,
    rotation: Rotation,
    attend: Attend,
    aux: AuxStates | None = None,
) -> Tensor:
    """Run decoder layers and the norm behind them over rows, [T, H] to [T, H]."""
    aux = aux or AuxStates(())
    norms = [layer.get_submodule("input_layernorm") for layer in layers]
    norms.append(final_norm)
    normed_TH: Tensor = norms[0](hidden_TH)
    for number, layer in enumerate(layers):
        aux.record(number, hidden_TH)
        fed_STH, hidden_TH = layer(normed_TH, hidden_TH, rotation, attend, in_parts=True)
        normed_TH, hidden_TH = norms[number + 1](fed_STH, hidden_TH)
    aux.record(len(layers), hidden_TH)
    return normed_TH


class LlamaModel(nn.Module):
    """A dense Llama, Mistral, Qwen2 or Qwen3 language model.

    Parameters have the names of a Hugging Face state dict. ``forward`` and ``logits`` never
    synchronise and have static shapes, so that they can be captured.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.model = LlamaDecoder(config)
        self.lm_head: nn.Linear = Linear(config.hidden_size, config.vocab_size, bias=False)
        self.tie_weights()

    def tie_weights(self) -> None:
        """Share the embedding's weight with the output head if the config ties them.

        Call it after parameters were replaced, for example by ``to_empty``.
        """
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(
        self,
        input_ids_T: Tensor | None,
        positions_T: Tensor,
        attend: Attend,
        *,
        input_embeds: Tensor | None = None,
        aux: AuxStates | None = None,
    ) -> Tensor:
        """Run the model over flat tokens up to and including the final norm.

        Args:
            input_ids_T: Token ids; may be ``None`` if ``input_embeds`` is given.
            positions_T: Position of each token in its request.
            attend: Stores keys and values and attends; called once per layer.
            input_embeds: Replaces the embeddings of the ids.
            aux: Records residual streams of this forward.

        Shapes:
            input_ids_T, positions_T: [T] int32 or int64.
            input_embeds: [T, H].
            result: [T, H], in the model's dtype.

        Raises:
            InputError: Both ``input_ids_T`` and ``input_embeds`` are ``None``.
        """
        if input_embeds is None:
            if input_ids_T is None:
                raise InputError(
                    "forward got neither input_ids_T nor input_embeds. Pass one of them.",
                    field="input_ids_T",
                )
            input_embeds = self.model.embed_tokens(input_ids_T)
        hidden_TH: Tensor = self.model(input_embeds, positions_T, attend, aux)
        return hidden_TH

    @property
    def embedding(self) -> nn.Module:
        """The embedding of token ids."""
        return self.model.embed_tokens

    def logits(self, hidden_TH: Tensor) -> Tensor:
        """Apply the output head: [T, H] after the final norm to [T, V], in the model's dtype."""
        logits_TV: Tensor = self.lm_head(hidden_TH)
        return logits_TV


def causal_attend(batch_size: int, length: int, window: int | None = None) -> Attend:
    """Return an ``attend`` without a cache, for B sequences of length L packed as T = B * L rows.

    Row b * L + i attends to rows b * L to b * L + i, or to the last ``window`` of them. For
    training and full-sequence runs.
    """

    def heads_first(x: Tensor) -> Tensor:
        return x.reshape(batch_size, length, *x.shape[1:]).transpose(1, 2)

    def attend(layer: int, query_TND: Tensor, key_TMD: Tensor, value_TMD: Tensor) -> Tensor:
        del layer  # all layers use the same mask
        query, key, value = (heads_first(x) for x in (query_TND, key_TMD, value_TMD))
        mask = None
        if window is not None:
            ones = torch.ones(length, length, dtype=torch.bool, device=query.device)
            mask = ones.tril().triu(1 - window)
        out = scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=True
        )
        return out.transpose(1, 2).flatten(0, 1)

    return attend


def full_logits(model: LlamaModel, ids_BL: Tensor) -> Tensor:
    """Run full sequences from position 0 without a cache: ids [B, L] to logits [B, L, V]."""
    batch_size, length = ids_BL.shape
    positions_T = torch.arange(length, device=ids_BL.device).repeat(batch_size)
    attend = causal_attend(batch_size, length, model.config.sliding_window)
    hidden_TH = model(ids_BL.flatten(), positions_T, attend)
    return model.logits(hidden_TH).view(batch_size, length, -1)
