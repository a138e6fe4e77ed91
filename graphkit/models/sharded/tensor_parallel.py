"""Tensor parallelism: a model of which each rank has a part of every layer and of the head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from graphkit.config import require_type
from graphkit.distributed import RankGroup
from graphkit.models.heads.config import LlamaConfig
from graphkit.models.heads.layers import DecoderLayer
from graphkit.models.heads.sharded_layers import (
    GatheredLinear,
    SummingNorm,
    local_config,
    part_of,
    split_layers,
)
from graphkit.models.sharded.model import LlamaModel
from graphkit.models.weight_files import copy_part


class ShardedLlama(LlamaModel):
    """A ``LlamaModel`` whose weights are split over ranks; its results are on every rank.

    Every rank calls it with the same batch. Draft heads of such a model are split too, and share
    its output head.

    Args:
        config: The whole model.
        group: The ranks.

    Attributes:
        config: What this rank has of each layer; the vocabulary and the hidden size are whole.
        group: As given.

    Raises:
        ConfigError: ``group`` is no ``RankGroup``, or heads or MLP cannot be split evenly.
    """

    def __init__(self, config: LlamaConfig, group: RankGroup) -> None:
        require_type("ShardedLlama", "group", group, RankGroup, "a graphkit.RankGroup")
        super().__init__(replace(local_config(config, group.size), tie_word_embeddings=False))
        self.is_tied = config.tie_word_embeddings
        """Whether the head has the rows of the embedding."""
        self.group = group
        self.lm_head = GatheredLinear(self.lm_head, group)
        split_layers(self.model, group, adds_up=False)
        for layer in self.model.layers:
            assert isinstance(layer, DecoderLayer), "a model has decoder layers"
            layer.input_layernorm = SummingNorm(layer.input_layernorm, group)
        self.model.norm = SummingNorm(self.model.norm, group)

    def tie_weights(self) -> None:
        """Copy this rank's rows of the embedding into the head if the config ties them."""
        if not getattr(self, "is_tied", False):
            return
        embedding = self.model.embed_tokens.weight
        with torch.no_grad():
            rows = embedding[part_of("lm_head.weight", embedding.shape, self.group)]
            copy_part(rows, self.lm_head.weight)

    def copy_from(self, whole: Mapping[str, Tensor]) -> None:
        """Copy this rank's part of the tensors of a whole model, by name."""
        with torch.no_grad():
            for name, target in self.state_dict().items():
                if name in whole:
                    copy_part(whole[name][part_of(name, whole[name].shape, self.group)], target)
        self.tie_weights()


def group_of(model: object) -> RankGroup | None:
    """Return the ranks that split a model, if any."""
    group: RankGroup | None = getattr(model, "group", None)
    return group


def shard_model(model: LlamaModel, group: RankGroup) -> ShardedLlama:
    """Return this rank's part of a model, on its device and in its dtype.

    Every rank has the whole model until then; ``load_checkpoint(group=...)`` does not read it.

    Raises:
        ConfigError: Heads or MLP cannot be split evenly.
    """
    weight = model.lm_head.weight
    with torch.device(weight.device):
        sharded = ShardedLlama(model.config, group).to(weight.dtype)
    sharded.copy_from(model.state_dict())
    return sharded.eval().requires_grad_(False)
