"""EAGLE-3's draft head: features of three target layers, and a vocabulary of its own.

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
    """A decoder layer that attends over embedding and feature side by side."""

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
        """Return the residual stream after this layer, [T, H]; it began as the feature."""
        both = torch.cat((self.input_layernorm(embedded_TH), self.hidden_norm(hidden_TH)), dim=-1)
        hidden_TH = hidden_TH + self.self_attn(both, rotation, attend)
        fed_TH: Tensor = self.mlp(self.post_attention_layernorm(hidden_TH))
        return hidden_TH + fed_TH


class Eagle3Head(nn.Module):
    """The head of EAGLE-3 (arXiv 2503.01840), in the layout of its published weights.

    Tokens are shifted as for ``EagleHead``. The first draft step takes the outputs of three target
    layers side by side; further steps take the head's own last result. The target's embedding is
    borrowed unless the weights bring their own. Nothing synchronises; shapes are static.

    Args:
        config: Sizes and switches of the one layer.
        target: The model that the head drafts for.
        draft_vocab_size: Tokens that the head may draft; ``None`` is the target's vocabulary.
        fc_bias: Whether ``fc`` has a bias.
        has_embedding: Whether the head has an embedding of its own.

    Raises:
        ConfigError: The config asks for several layers, or does not fit the target.
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
        # A bound method, as assigning a module would register it.
        embedding = self.embed_tokens if has_embedding else target.model.embed_tokens
        self._embed = embedding.forward

    def forward(
        self, input_ids_T: Tensor, hidden_TF: Tensor, positions_T: Tensor, attend: Attend
    ) -> Tensor:
        """Run the head over flat tokens.

        Args:
            input_ids_T: Each row's next token, in the target's vocabulary.
            hidden_TF: Three target layers' outputs, or this head's last result.
            positions_T: Each row's position in its own request.
            attend: Stores keys and values and attends; called with layer 0.

        Shapes:
            input_ids_T, positions_T: [T] int32 or int64.
            hidden_TF: [T, 3 H] or [T, H].
            result: [T, H], before the final norm.
        """
        hidden_TH = self.fc(hidden_TF) if hidden_TF.shape[1] == self.fc.in_features else hidden_TF
        rotation = self.rotary_emb(positions_T, hidden_TH.dtype)
        out_TH: Tensor = self.midlayer(self._embed(input_ids_T), hidden_TH, rotation, attend)
        return out_TH

    def logits(self, hidden_TH: Tensor) -> Tensor:
        """Apply norm and head: [T, H] to [T, V]."""
        logits_TV: Tensor = self.lm_head(self.norm(hidden_TH))
        return logits_TV

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """Translate draft tokens of any shape: ``d2t`` holds how far off each one's own id is."""
        return draft_ids if self.d2t is None else draft_ids + self.d2t[draft_ids]
