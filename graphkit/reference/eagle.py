"""EAGLE's draft head: one decoder layer over the target's features.

Tensor suffixes: T tokens, H hidden, V vocabulary.
"""
# ruff: noqa: N803, N806 -- the suffixes are shapes

from __future__ import annotations

import torch
from torch import Tensor, nn

from graphkit.errors import ConfigError
from graphkit.reference.config import LlamaConfig
from graphkit.reference.layers import Attend, DecoderLayer
from graphkit.reference.model import LlamaModel
from graphkit.reference.rope import RotaryEmbedding


class EagleHead(nn.Module):
    """The head of EAGLE and EAGLE-2, in the layout of its published weights.

    Row p of a request takes the target's feature (its hidden state after the final norm) at
    position p and the token of position p + 1; its logits predict the token of position p + 2.
    Further draft steps feed the head's own hidden states back as features. Layer 0 has no input
    norm and there is no final one (arXiv 2401.15077, section 3.1).

    The target's head, and its embedding unless the weights bring their own, are borrowed: they
    appear in no ``state_dict`` or ``parameters`` of this module and do not move with it.
    ``forward`` and ``logits`` never synchronise and have static shapes; they may be captured.

    Args:
        config: Sizes and switches of the one layer.
        target: The model that the head drafts for.
        fc_bias: Whether ``fc`` has a bias.
        has_embedding: Whether the head has an embedding of its own.

    Raises:
        ConfigError: The config asks for several layers, or does not fit the target.
    """

    def __init__(
        self,
        config: LlamaConfig,
        target: LlamaModel,
        *,
        fc_bias: bool = False,
        has_embedding: bool = False,
    ) -> None:
        super().__init__()
        check_fit(config, target)
        check_one_layer(config)
        self.config = config
        if has_embedding:
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=fc_bias)
        self.layers = nn.ModuleList([DecoderLayer(config, 0, has_input_norm=False)])
        self.rotary_emb = RotaryEmbedding(config)
        # Bound methods, as assigning a module would register it.
        embedding = self.embed_tokens if has_embedding else target.model.embed_tokens
        self._embed, self._target_logits = embedding.forward, target.logits

    def forward(
        self, input_ids_T: Tensor, hidden_TH: Tensor, positions_T: Tensor, attend: Attend
    ) -> Tensor:
        """Run the head over flat tokens.

        Args:
            input_ids_T: Each row's next token: that of its position plus 1.
            hidden_TH: The target's features, or this head's last result.
            positions_T: Each row's position in its own request.
            attend: Stores keys and values and attends; called with layer 0.

        Shapes:
            input_ids_T, positions_T: [T] int32 or int64.
            hidden_TH, result: [T, H].
        """
        merged_TH = self.fc(torch.cat((self._embed(input_ids_T), hidden_TH), dim=-1))
        rotation = self.rotary_emb(positions_T, merged_TH.dtype)
        out_TH: Tensor = self.layers[0](merged_TH, rotation, attend)
        return out_TH

    def logits(self, hidden_TH: Tensor) -> Tensor:
        """Apply the target's head: [T, H] to [T, V]."""
        return self._target_logits(hidden_TH)


def check_fit(config: LlamaConfig, target: LlamaModel) -> None:
    """Compare what a draft head shares with its target.

    Raises:
        ConfigError: Hidden size or vocabulary differ; the text names both values.
    """
    for field in ("hidden_size", "vocab_size"):
        drafted, allowed = getattr(config, field), getattr(target.config, field)
        if drafted != allowed:
            raise ConfigError(
                f"the draft head has {field} {drafted}, but its target has {allowed}. Take the "
                "target that the head was trained for.",
                field=field,
            )


def check_one_layer(config: LlamaConfig) -> None:
    """Refuse a head of several layers.

    Raises:
        ConfigError: num_hidden_layers is not 1.
    """
    if config.num_hidden_layers != 1:
        raise ConfigError(
            f"an EAGLE head has num_hidden_layers 1, got {config.num_hidden_layers}. Give the "
            "head's config, not the target's.",
            field="num_hidden_layers",
        )
