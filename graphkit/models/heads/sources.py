"""What a draft head uses of its target, and what it reads for each row.

Tensor suffixes: T tokens, H hidden, V vocabulary.
"""

# ruff: noqa: N803, N806 -- the suffixes are shapes

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from graphkit.distributed import RankGroup
from graphkit.errors import ConfigError
from graphkit.ops.decoder import embed_and_join


@dataclass(frozen=True, slots=True, eq=False)
class HeadSources:
    """What a draft head uses of its target. It holds no weights of its own.

    Attributes:
        embedding: Maps token ids to rows, [T] to [T, H].
        lm_head: Maps hidden states to logits; its ``weight`` has the dtype and the device of the
            target, and this rank's rows if ranks split it.
        num_hidden_layers: Decoder layers of the target.
        group: Ranks that split the target, and its draft heads with it; ``None`` on one device.
    """

    embedding: nn.Module
    lm_head: nn.Linear
    num_hidden_layers: int
    group: RankGroup | None = None

    @property
    def hidden_size(self) -> int:
        """Width of the hidden states."""
        return self.lm_head.in_features

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary."""
        return self.lm_head.out_features

    def logits(self, hidden_TH: Tensor) -> Tensor:
        """Apply the output head: [T, H] to [T, V]."""
        logits_TV: Tensor = self.lm_head(hidden_TH)
        return logits_TV


def check_fit(config: PreTrainedConfig, target: HeadSources) -> None:
    """Check that a draft head has the hidden size and vocabulary of its target.

    Raises:
        ConfigError: One of them differs.
    """
    for field in ("hidden_size", "vocab_size"):
        value, expected = getattr(config, field), getattr(target, field)
        if value != expected:
            raise ConfigError(
                f"the draft head has {field} {value}, but its target has {expected}. Use the "
                "target that the head was trained for.",
                field=field,
            )


def join_inputs(
    embedding: nn.Module,
    input_ids_T: Tensor,
    hidden_TH: Tensor,
    norms: tuple[nn.Module, nn.Module] | None = None,
    eps: float = 0.0,
) -> Tensor:
    """Embed tokens and put features beside them.

    One op does both, and the norms, where the embedding is a table in the dtype of the features and
    no gradient is recorded. Otherwise the modules run, so that a gradient needs no second forward.

    Args:
        embedding: Maps token ids to rows; of the head, or of its target.
        input_ids_T: Token of each row.
        hidden_TH: Feature of each row.
        norms: Root mean square norms of embeddings and of features; ``None`` for none.
        eps: Added to the mean squares by both norms.

    Shapes:
        input_ids_T: [T] int32 or int64. hidden_TH: [T, H]. result: [T, 2 H].
    """
    table = _table(embedding)
    if table is None or table.dtype != hidden_TH.dtype or torch.is_grad_enabled():
        embedded_TH = embedding.forward(input_ids_T)
        if norms is not None:
            embedded_TH, hidden_TH = norms[0](embedded_TH), norms[1](hidden_TH)
        return torch.cat((embedded_TH, hidden_TH), dim=-1)
    if norms is None:
        return embed_and_join(input_ids_T, table, hidden_TH)
    first, second = (norm.get_parameter("weight") for norm in norms)
    return embed_and_join(input_ids_T, table, hidden_TH, first, second, eps)


def _table(embedding: nn.Module) -> Tensor | None:
    """Return the rows of an embedding by token; ``None`` if it does more than look them up."""
    if not isinstance(embedding, nn.Embedding) or embedding.max_norm is not None:
        return None
    if getattr(embedding.forward, "__func__", None) is not nn.Embedding.forward:
        return None
    weight: Tensor = embedding.weight
    return weight if type(weight) is nn.Parameter else None  # quantised ones are of other types
