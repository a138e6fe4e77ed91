"""The draft head of EAGLE: one decoder layer over the target's hidden states.

Tensor suffixes: T tokens, H hidden, V vocabulary.
"""
# ruff: noqa: N803, N806 -- the suffixes are shapes

from __future__ import annotations

from functools import partial

from torch import Tensor, nn
from transformers import PreTrainedConfig

from graphkit.errors import ConfigError
from graphkit.models.heads.layers import DraftHead
from graphkit.models.heads.sources import HeadSources, join_inputs
from graphkit.models.quantization import Linear


class EagleHead(DraftHead):
    """The head of EAGLE and EAGLE-2, in the layout of its published weights.

    Row p of a request takes the target's feature (its hidden state after the final norm) at
    position p and the token of position p + 1; its logits predict the token of position p + 2.
    Further draft steps feed the head's own hidden states back as features. Layer 0 has no input
    norm and there is no final one (arXiv 2401.15077, section 3.1).

    The head uses the target's output head unless ``has_head``, and its embedding unless
    ``has_embedding``. These belong to the target: they are not in this module's ``state_dict`` or
    ``parameters`` and do not move with it. ``forward`` and ``logits`` never synchronise and have
    static shapes, so that they can be captured.

    Args:
        config: Sizes and options of the layer.
        target: The model that the head drafts for.
        fc_bias: Whether ``fc`` has a bias.
        has_embedding: Whether the head has its own embedding.
        has_head: Whether it has its own output head.

    Raises:
        ConfigError: The config has several layers, or does not match the target.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        target: HeadSources,
        *,
        fc_bias: bool = False,
        has_embedding: bool = False,
        has_head: bool = False,
    ) -> None:
        super().__init__(config, target)
        check_one_layer(config)
        if has_embedding:
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.fc = Linear(2 * config.hidden_size, config.hidden_size, bias=fc_bias)
        layer = self.new_layer(0)
        layer.input_layernorm = nn.Identity()
        self.layers = nn.ModuleList([layer])
        if has_head:
            self.lm_head: nn.Linear = Linear(config.hidden_size, config.vocab_size, bias=False)
        # Not modules: assigning one would register it as a submodule.
        self._inputs = partial(
            join_inputs, self.embed_tokens if has_embedding else target.embedding
        )
        self._target_logits = None if has_head else target.logits

    def run_random(self, positions_T: Tensor) -> Tensor:
        """See ``DraftHead.run_random``."""
        ids_T, hidden_TH = self.random_rows(len(positions_T), self.config.hidden_size)
        out_TH: Tensor = self(ids_T, hidden_TH, positions_T)
        return out_TH

    def forward(self, input_ids_T: Tensor, hidden_TH: Tensor, positions_T: Tensor) -> Tensor:
        """Run the head over flat tokens.

        Args:
            input_ids_T: Token of the position after each row.
            hidden_TH: The target's features, or the result of the previous draft step.
            positions_T: Position of each row in its request.

        Shapes:
            input_ids_T, positions_T: [T] int32 or int64.
            hidden_TH, result: [T, H].
        """
        merged_TH = self.fc(self._inputs(input_ids_T, hidden_TH))
        return self.decode(self.layers, merged_TH, positions_T)[0]

    def logits(self, hidden_TH: Tensor) -> Tensor:
        """Apply the output head: [T, H] to [T, V]."""
        if self._target_logits is not None:
            return self._target_logits(hidden_TH)
        logits_TV: Tensor = self.lm_head(hidden_TH)
        return logits_TV


def check_one_layer(config: PreTrainedConfig) -> None:
    """Check that a head has one layer.

    Raises:
        ConfigError: ``num_hidden_layers`` is not 1.
    """
    if config.num_hidden_layers != 1:
        raise ConfigError(
            f"an EAGLE head must have num_hidden_layers 1, got {config.num_hidden_layers}. Use a "
            "head of one layer, and its config.json, not that of the target.",
            field="num_hidden_layers",
        )
