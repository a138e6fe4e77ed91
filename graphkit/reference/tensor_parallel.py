"""Tensor parallelism: each rank has some of the heads, of the MLP and of the vocabulary.

The layers follow Megatron-LM (arXiv 1909.08053, section 3). Projections into heads and into the MLP
are split by output, those back to the residual stream by input, and their products are added up by
one all-reduce each. The output head is split by vocabulary and its logits are gathered, so that
every rank has all logits, with the same bits. Embedding and norms are on every rank.

``torch.distributed.tensor.parallel`` does not fit these models: a ``MergedLinear`` has the rows of
several projections side by side, and each of them is split, not the whole. DTensor also decides on
the host, per operation, what a fixed layout needs no decision for.

Tensor suffixes: T tokens, H hidden, V vocabulary, R ranks, P vocabulary rows of a rank.
"""
# ruff: noqa: N803, N806 -- the suffixes are shapes

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from graphkit.distributed import RankGroup
from graphkit.errors import ConfigError
from graphkit.reference.config import LlamaConfig
from graphkit.reference.layers import DecoderLayer
from graphkit.reference.model import LlamaModel

_BY_OUTPUT = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
_BY_INPUT = ("o_proj", "down_proj")
_SPLIT = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
_HEAD = "lm_head.weight"


class InputSplitLinear(nn.Linear):
    """A linear layer whose input is split over the ranks: one product and one all-reduce.

    Args:
        whole: The layer of all ranks, of which this one has 1 / R of the inputs already.
        group: The ranks.
    """

    def __init__(self, whole: nn.Linear, group: RankGroup) -> None:
        self._has_bias = getattr(whole, "bias", None) is not None
        super().__init__(whole.in_features, whole.out_features, bias=self._has_bias)
        self._collectives = group.collectives

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum over all ranks, plus the bias."""
        out = self._collectives.all_reduce(linear(x, self.weight))
        return out + self.bias if self._has_bias else out


class VocabularyHead(nn.Linear):
    """An output head of which each rank has P rows; the last rank's may include padding.

    Args:
        hidden_size: Width of the input.
        vocab_size: Rows of all ranks.
        group: The ranks.
    """

    def __init__(self, hidden_size: int, vocab_size: int, group: RankGroup) -> None:
        super().__init__(hidden_size, -(-vocab_size // group.size), bias=False)
        self._vocab_size, self._collectives = vocab_size, group.collectives

    def forward(self, hidden_TH: Tensor) -> Tensor:
        """Return the logits of the whole vocabulary on every rank, [T, V]."""
        logits_TP = linear(hidden_TH, self.weight)
        return self._collectives.all_gather(logits_TP)[:, : self._vocab_size]


class ShardedLlama(LlamaModel):
    """A ``LlamaModel`` whose weights are split over ranks; its results are on every rank.

    Every rank calls it with the same batch. Draft heads of such a model are replicated, and share
    the split output head.

    Args:
        config: The whole model.
        group: The ranks.

    Attributes:
        config: What this rank has of each layer; the vocabulary and the hidden size are whole.
        group: As given.

    Raises:
        ConfigError: Heads or MLP cannot be split evenly.
    """

    def __init__(self, config: LlamaConfig, group: RankGroup) -> None:
        super().__init__(replace(local_config(config, group.size), tie_word_embeddings=False))
        self.is_tied = config.tie_word_embeddings
        """Whether the head has the rows of the embedding."""
        self.group = group
        self.lm_head = VocabularyHead(config.hidden_size, config.vocab_size, group)
        for layer in self.model.layers:
            assert isinstance(layer, DecoderLayer), "a model has decoder layers"
            layer.self_attn.o_proj = InputSplitLinear(layer.self_attn.o_proj, group)
            layer.mlp.down_proj = InputSplitLinear(layer.mlp.down_proj, group)

    def part_of(self, name: str, shape: Sequence[int]) -> tuple[slice, ...]:
        """Return the slice of a tensor of the whole model that this rank has.

        Args:
            name: Name in the state dict.
            shape: Shape of the whole tensor.
        """
        layer = name.rsplit(".", 2)[-2] if "." in name else name
        if name == _HEAD:
            rank, rows = self.group.rank, len(self.lm_head.weight)
            return (slice(rank * rows, min((rank + 1) * rows, shape[0])),)
        if layer in _BY_OUTPUT:
            return (self._share(shape[0]),)
        if layer in _BY_INPUT and name.endswith(".weight"):
            return (slice(None), self._share(shape[1]))
        return ()

    def tie_weights(self) -> None:
        """Copy this rank's rows of the embedding into the head if the config ties them."""
        if not getattr(self, "is_tied", False):
            return
        embedding = self.model.embed_tokens.weight
        with torch.no_grad():
            self.lm_head.weight.zero_()
            rows = embedding[self.part_of(_HEAD, embedding.shape)]
            self.lm_head.weight[: len(rows)].copy_(rows)

    def copy_from(self, whole: Mapping[str, Tensor]) -> None:
        """Copy this rank's part of the tensors of a whole model, by name."""
        with torch.no_grad():
            for name, target in self.state_dict().items():
                if name in whole:
                    copy_part(whole[name][self.part_of(name, whole[name].shape)], target)
        self.tie_weights()

    def _share(self, size: int) -> slice:
        part = size // self.group.size
        return slice(self.group.rank * part, (self.group.rank + 1) * part)


def copy_part(part: Tensor, target: Tensor) -> None:
    """Copy a part into a tensor; rows of padding become 0."""
    target[len(part) :].zero_()
    target[: len(part)].copy_(part)


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


def local_config(config: LlamaConfig, ranks: int) -> LlamaConfig:
    """Return the sizes of one rank's layers.

    Raises:
        ConfigError: A size is no multiple of the number of ranks.
    """
    for field in _SPLIT:
        if getattr(config, field) % ranks:
            raise ConfigError(
                f"{field} is {getattr(config, field)}, which {ranks} ranks cannot split evenly. "
                "Use a number of ranks that divides it.",
                field=field,
            )
    return replace(config, **{field: getattr(config, field) // ranks for field in _SPLIT})
