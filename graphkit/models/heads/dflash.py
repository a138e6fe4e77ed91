"""The draft model of DFLASH: it fills a block of mask tokens in one forward (arXiv 2602.06036).

Tensor suffixes: T rows, H hidden, F features (n H for n target layers), V vocabulary, M key and
value heads, D head dim.
"""
# ruff: noqa: N803, N806 -- the suffixes are shapes

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from graphkit.config import require_int
from graphkit.errors import ConfigError
from graphkit.models.heads.config import LayerConfig
from graphkit.models.heads.layers import Attend, Attention, DecoderLayer, RMSNorm, run_layers
from graphkit.models.heads.rope import RotaryEmbedding
from graphkit.models.heads.sources import HeadSources, check_fit
from graphkit.models.quantization import Linear


class ContextEncoder(nn.Module):
    """Projects the outputs of several target layers to one row per token.

    Args:
        config: Sizes of the head.
        num_layers: Target layers (n).
    """

    def __init__(self, config: LayerConfig, num_layers: int) -> None:
        super().__init__()
        size = config.hidden_size
        self.fc = Linear(num_layers * size, size, bias=False)
        self.output_norm_enc = RMSNorm(size, config.rms_norm_eps)

    def forward(self, features_TF: Tensor) -> Tensor:
        """Return the normalised projection, [T, H]."""
        context_TH: Tensor = self.output_norm_enc(self.fc(features_TF))
        return context_TH


class DFlashHead(nn.Module):
    """A DFLASH draft model, with the parameter names of transformers' Muse Glimmer assistant.

    Each layer attends to two kinds of keys and values: those of the context, which it projects from
    the target's hidden states of committed tokens, and those of the block itself. A block is the
    bonus token and mask tokens; the row of a mask token predicts the token of its position. All
    rows of a block see each other.

    The head uses the target's embedding and output head. These belong to the target: they are not
    in this module's ``state_dict`` or ``parameters`` and do not move with it. Nothing synchronises;
    shapes are static.

    Args:
        config: Sizes and options of the layers.
        target: The model that the head drafts for.
        target_layer_ids: Target layers whose outputs are the context, from 0.
        block_size: Rows of a block, the bonus token included.
        mask_token_id: Token of the target's vocabulary that stands for tokens to predict.

    Raises:
        ConfigError: The config does not match the target, or the target has no such layer or token.
    """

    def __init__(
        self,
        config: LayerConfig,
        target: HeadSources,
        *,
        target_layer_ids: Sequence[int],
        block_size: int,
        mask_token_id: int,
    ) -> None:
        super().__init__()
        check_fit(config, target)
        require_int("DFlashHead", "block_size", block_size, least=2)
        self.config = config
        self.target_layer_ids = _checked(target_layer_ids, target.num_hidden_layers)
        self.block_size, self.mask_token_id = block_size, _token(mask_token_id, config)
        self.encoder = ContextEncoder(config, len(self.target_layer_ids))
        self.layers = nn.ModuleList(
            DecoderLayer(config, i) for i in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = RotaryEmbedding(config)
        # Bound methods, because assigning a module would register it as a submodule.
        self._embed, self._target_logits = target.embedding.forward, target.logits

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """The target layers whose inputs are the context; see ``AuxStates``."""
        return tuple(layer + 1 for layer in self.target_layer_ids)

    def context_heads(self, context_TH: Tensor, positions_T: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return the keys and values of committed tokens, for each layer.

        Args:
            context_TH: What ``encoder`` returns for the target's hidden states of
                ``target_layer_ids``, side by side.
            positions_T: Position of each token in its request.

        Shapes:
            context_TH: [T, H]. positions_T: [T] int32 or int64. results: [T, M, D] each.
        """
        rotation = self.rotary_emb(positions_T)
        attentions = (layer.get_submodule("self_attn") for layer in self.layers)
        return [
            attention.keys_and_values(context_TH, rotation)
            for attention in attentions
            if isinstance(attention, Attention)
        ]

    def forward(self, input_ids_T: Tensor, positions_T: Tensor, attend: Attend) -> Tensor:
        """Run the head over the rows of blocks.

        Args:
            input_ids_T: Bonus and mask tokens.
            positions_T: Position of each row in its request.
            attend: Stores keys and values of the block and attends to the context and the block.

        Shapes:
            input_ids_T, positions_T: [T] int32 or int64.
            result: [T, H], after the final norm.
        """
        rotation = self.rotary_emb(positions_T)
        return run_layers(self.layers, self.norm, self._embed(input_ids_T), rotation, attend)

    def logits(self, hidden_TH: Tensor) -> Tensor:
        """Apply the target's output head: [T, H] to [T, V]."""
        return self._target_logits(hidden_TH)


def _checked(layers: Sequence[int], num_layers: int) -> tuple[int, ...]:
    # Engines differ in whether the output of the last layer is taken before the final norm.
    if not layers or not all(0 <= layer < num_layers - 1 for layer in layers):
        raise ConfigError(
            f"the DFLASH head reads the outputs of target layers {', '.join(map(str, layers))}, "
            f"expected at least one of layers 0 to {num_layers - 2}, all but the target's last. "
            "Use the target that the head was trained for.",
            field="target_layer_ids",
        )
    return tuple(layers)


def _token(token: int, config: LayerConfig) -> int:
    if not 0 <= token < config.vocab_size:
        raise ConfigError(
            f"mask_token_id is {token}, but the target has tokens 0 to {config.vocab_size - 1}. "
            "Use the target that the head was trained for.",
            field="mask_token_id",
        )
    return token
