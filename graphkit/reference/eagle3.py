"""The draft head of EAGLE-3: features of three target layers and a reduced vocabulary.

Tensor suffixes: T tokens, H hidden, F features (H or 3 H), V draft vocabulary.
"""
# ruff: noqa: N803, N806 -- the suffixes are shapes

from __future__ import annotations

import torch
from torch import Tensor, nn

from graphkit.reference.config import LlamaConfig
from graphkit.reference.eagle import check_fit, check_one_layer
from graphkit.reference.layers import MLP, Attend, Attention, RMSNorm
from graphkit.reference.model import LlamaModel
from graphkit.reference.rope import RotaryEmbedding, Rotation


class Eagle3Layer(nn.Module):
    """A decoder layer whose attention reads the concatenation of embedding and feature."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = Attention(config, 0, input_size=2 * size)
        self.mlp = MLP(config)
        self.hidden_norm = RMSNorm(size, eps)
        self.input_layernorm = RMSNorm(size, eps)
        self.post_attention_layernorm = RMSNorm(size, eps)

    def forward(
        self, embedded_TH: Tensor, hidden_TH: Tensor, rotation: Rotation, attend: Attend
    ) -> Tensor:
        """Return the residual stream after this layer, [T, H]. It starts with the feature."""
        both = torch.cat((self.input_layernorm(embedded_TH), self.hidden_norm(hidden_TH)), dim=-1)
        mixed_TH: Tensor = self.self_attn(both, rotation, attend)
        normed_TH, hidden_TH = self.post_attention_layernorm.add(mixed_TH, hidden_TH)
        fed_TH: Tensor = self.mlp(normed_TH)
        return hidden_TH + fed_TH


class Eagle3Head(nn.Module):
    """The head of EAGLE-3 (arXiv 2503.01840), in the layout of its published weights.

    Tokens are shifted as in ``EagleHead``. The first draft step reads the concatenated outputs of
    three target layers; later steps read the result of the step before. The head uses the target's
    embedding unless ``has_embedding``. Nothing synchronises; shapes are static.

    Args:
        config: Sizes and options of the layer.
        target: The model that the head drafts for.
        draft_vocab_size: Tokens that the head can draft; ``None`` takes the target's vocabulary.
        fc_bias: Whether ``fc`` has a bias.
        has_embedding: Whether the head has its own embedding.

    Raises:
        ConfigError: The config has several layers, or does not match the target.
    """

    d2t: Tensor | None

    def __init__(
        self,
        config: LlamaConfig,
        target: LlamaModel,
        *,
        draft_vocab_size: int | None = None,
        fc_bias: bool = False,
        has_embedding: bool = False,
    ) -> None:
        super().__init__()
        check_fit(config, target)
        check_one_layer(config)
        size, vocab_size = config.hidden_size, draft_vocab_size or config.vocab_size
        self.config = config
        if has_embedding:
            self.embed_tokens = nn.Embedding(config.vocab_size, size)
        self.fc = nn.Linear(3 * size, size, bias=fc_bias)
        self.midlayer = Eagle3Layer(config)
        self.norm = RMSNorm(size, config.rms_norm_eps)
        self.lm_head = nn.Linear(size, vocab_size, bias=False)
        is_reduced = vocab_size != config.vocab_size
        self.register_buffer(
            "d2t", torch.zeros(vocab_size, dtype=torch.int64) if is_reduced else None
        )
        self.rotary_emb = RotaryEmbedding(config)
        # A bound method, because assigning a module would register it as a submodule.
        embedding = self.embed_tokens if has_embedding else target.model.embed_tokens
        self._embed = embedding.forward

    def forward(
        self, input_ids_T: Tensor, hidden_TF: Tensor, positions_T: Tensor, attend: Attend
    ) -> Tensor:
        """Run the head over flat tokens.

        Args:
            input_ids_T: Token of the position after each row, in the target's vocabulary.
            hidden_TF: Outputs of three target layers, or the result of the previous draft step.
            positions_T: Position of each row in its request.
            attend: Stores keys and values and attends; called with layer 0.

        Shapes:
            input_ids_T, positions_T: [T] int32 or int64.
            hidden_TF: [T, 3 H] or [T, H].
            result: [T, H], before the final norm.
        """
        hidden_TH = self.fc(hidden_TF) if hidden_TF.shape[1] == self.fc.in_features else hidden_TF
        rotation = self.rotary_emb(positions_T)
        out_TH: Tensor = self.midlayer(self._embed(input_ids_T), hidden_TH, rotation, attend)
        return out_TH

    def logits(self, hidden_TH: Tensor) -> Tensor:
        """Apply the final norm and the output head: [T, H] to [T, V]."""
        logits_TV: Tensor = self.lm_head(self.norm(hidden_TH))
        return logits_TV

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """Map draft token ids of any shape to target token ids; ``d2t`` holds the differences."""
        return draft_ids if self.d2t is None else draft_ids + self.d2t[draft_ids]
