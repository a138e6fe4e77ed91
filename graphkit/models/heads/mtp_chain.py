"""Multi-token prediction: one draft layer per step, for multi-layer EAGLE.

Tensor suffixes: T tokens, H hidden, V vocabulary.
"""
# ruff: noqa: N803, N806 -- the suffixes are shapes

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from graphkit.models.heads.config import LlamaConfig
from graphkit.models.heads.inputs import join_inputs
from graphkit.models.heads.layers import Attend, DecoderLayer, RMSNorm
from graphkit.models.heads.rope import RotaryEmbedding
from graphkit.models.heads.sources import HeadSources, check_fit
from graphkit.models.quantization import Linear


class MTPLayer(DecoderLayer):
    """A decoder layer, the projection that merges token and feature, and the final norm."""

    def __init__(self, config: LlamaConfig, layer: int) -> None:
        super().__init__(config, layer)
        size, eps = config.hidden_size, config.rms_norm_eps
        self.enorm, self.hnorm = RMSNorm(size, eps), RMSNorm(size, eps)
        self.eh_proj = Linear(2 * size, size, bias=False)
        self.shared_head = nn.ModuleDict({"norm": RMSNorm(size, eps)})

    @property
    def input_norms(self) -> tuple[RMSNorm, RMSNorm]:
        """The norms of embeddings and of features."""
        return self.enorm, self.hnorm


class MTPHead(nn.Module):
    """A chain of S draft layers with the parameter names of DeepSeek-V3 (arXiv 2412.19437, 2.2).

    Row p of layer i takes the token of position p + 1 + i and layer i - 1's hidden state of row p.
    Layer 0 takes the target's feature instead, its hidden state after the final norm. The logits
    predict the token of position p + 2 + i.

    The layers use the target's embedding and output head. These belong to the target: they are not
    in this module's ``state_dict`` or ``parameters`` and do not move with it. ``forward`` and
    ``logits`` never synchronise and have static shapes, so that they can be captured.

    Args:
        config: Sizes and options; ``num_hidden_layers`` is S.
        target: The model that the layers draft for.

    Raises:
        ConfigError: The config does not match the target.
    """

    def __init__(self, config: LlamaConfig, target: HeadSources) -> None:
        super().__init__()
        check_fit(config, target)
        self.config = config
        self.layers = nn.ModuleList(MTPLayer(config, i) for i in range(config.num_hidden_layers))
        self.rotary_emb = RotaryEmbedding(config)
        # Not modules: assigning one would register it as a submodule.
        self._inputs = partial(join_inputs, target.embedding)
        self._target_logits = target.logits

    def forward(
        self, i: int, input_ids_T: Tensor, hidden_TH: Tensor, positions_T: Tensor, attend: Attend
    ) -> Tensor:
        """Run layer ``i`` over flat tokens.

        Args:
            i: The layer, from 0 to S - 1.
            input_ids_T: Token of position p + 1 + i for the row of position p.
            hidden_TH: The target's features for layer 0, else the result of layer i - 1.
            positions_T: Position of each row in its request, equal for all layers.
            attend: Stores keys and values and attends; called with layer ``i``.

        Shapes:
            input_ids_T, positions_T: [T] int32 or int64.
            hidden_TH, result: [T, H].
        """
        layer = self.layers[i]
        assert isinstance(layer, MTPLayer), "self.layers contains MTPLayer only"
        merged_TH: Tensor = layer.eh_proj(self._inputs(input_ids_T, hidden_TH, layer.input_norms))
        normed_TH, rotation = layer.input_layernorm(merged_TH), self.rotary_emb(positions_T)
        fed_TH: Tensor
        fed_TH, hidden_TH = layer(normed_TH, merged_TH, rotation, attend)
        return fed_TH + hidden_TH

    def logits(self, i: int, hidden_TH: Tensor) -> Tensor:
        """Apply layer ``i``'s norm and the target's output head: [T, H] to [T, V]."""
        layer = self.layers[i]
        assert isinstance(layer, MTPLayer), "self.layers contains MTPLayer only"
        return self._target_logits(layer.shared_head["norm"](hidden_TH))
