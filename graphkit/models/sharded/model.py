"""A Llama-layout language model over flat tokens. The caller provides attention.

Tensor suffixes: B requests, L tokens of each, T tokens, S parts of a product, H hidden,
V vocabulary, N query heads, M key and value heads, D head dim.
"""
# ruff: noqa: N803, N806 -- the suffixes are shapes

from __future__ import annotations

import torch
from torch import Tensor, nn

from graphkit.errors import InputError
from graphkit.models.heads.config import LlamaConfig
from graphkit.models.heads.layers import (
    Attend,
    DecoderLayer,
    Embedding,
    RMSNorm,
    causal_attend,
    run_layers,
)
from graphkit.models.heads.rope import RotaryEmbedding
from graphkit.models.heads.sources import AuxStates
from graphkit.models.quantization import Linear


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
    def hidden_size(self) -> int:
        """Width of the hidden states."""
        return self.config.hidden_size

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary."""
        return self.config.vocab_size

    @property
    def num_hidden_layers(self) -> int:
        """Decoder layers."""
        return self.config.num_hidden_layers

    @property
    def embedding(self) -> nn.Module:
        """The embedding of token ids."""
        return self.model.embed_tokens

    def logits(self, hidden_TH: Tensor) -> Tensor:
        """Apply the output head: [T, H] after the final norm to [T, V], in the model's dtype."""
        logits_TV: Tensor = self.lm_head(hidden_TH)
        return logits_TV


def full_logits(model: LlamaModel, ids_BL: Tensor) -> Tensor:
    """Run full sequences from position 0 without a cache: ids [B, L] to logits [B, L, V]."""
    batch_size, length = ids_BL.shape
    positions_T = torch.arange(length, device=ids_BL.device).repeat(batch_size)
    attend = causal_attend(batch_size, length, model.config.sliding_window)
    hidden_TH = model(ids_BL.flatten(), positions_T, attend)
    return model.logits(hidden_TH).view(batch_size, length, -1)
