"""What a transformers model keeps per token and per request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn
from transformers import PreTrainedModel

from graphkit.engine.kv.scanned import ScanShape
from graphkit.errors import ConfigError

DRAFT_STEPS = 3
"""Draft steps of a model if none are given."""


@dataclass(frozen=True, slots=True)
class LatentSizes:
    """What a layer with latent attention keeps instead of keys and values.

    Attributes:
        rank: Elements of a latent.
        rotated_size: Elements of the rotated part of a key.
        projection: Name of the linear layer that makes keys and values of latents.
        cache_argument: Parameter of the module's forward that takes the cache.
    """

    rank: int
    rotated_size: int
    projection: str
    cache_argument: str


@dataclass(frozen=True, slots=True, eq=False)
class AttentionLayer:
    """One attention of a model.

    Attributes:
        name: Name of the module that attends. It occurs as often as the module attends in a
            forward.
        heads: Key-value heads.
        key_size: Elements of a key head.
        value_size: Elements of a value head.
        scaling: Factor on the scores.
        window: Most keys that a row sees; 0 for all.
        length_argument: Parameter of its forward that takes the cache, if it reads how many tokens
            the cache has; otherwise empty.
        latent: What it keeps instead of keys and values; ``None`` without latent attention.
        key_scale: Scale of the keys of all heads, or of each, in a pool of float8_e4m3fn; empty
            for 1.
        value_scale: Scale of the values, as ``key_scale``.
    """

    name: str
    heads: int
    key_size: int
    value_size: int
    scaling: float
    window: int
    length_argument: str = ""
    latent: LatentSizes | None = None
    key_scale: tuple[float, ...] = ()
    value_scale: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class RecurrentLayer:
    """One module with recurrent states.

    Attributes:
        name: Name of the module in the model.
        cache_argument: Parameter of its forward that takes the cache.
        shapes: Shape of one request's state by kind.
        dtypes: Dtype by kind.
        runs_at_once: Whether all rows of a batch run in one call of the module.
        recurrence: What it computes then, beside a convolution; ``None`` for nothing.
    """

    name: str
    cache_argument: str
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, torch.dtype]
    runs_at_once: bool = False
    recurrence: ScanShape | None = None


@dataclass(frozen=True, slots=True, eq=False)
class IndexLayer:
    """One module that selects the keys that rows attend to, by keys of its own.

    Attributes:
        name: Name of the module in the model.
        cache_argument: Parameter of its forward that takes the cache.
        size: Elements of an index key.
        dtype: Data type of an index key.
    """

    name: str
    cache_argument: str
    size: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class ModelLayout:
    """State of a model, in the order in which its forward reaches it, and what is replaced in it.

    Attributes:
        attention: The attention of all layers.
        recurrent: The modules with recurrent states.
        indexers: The modules with index keys.
        replaced: What computes in the place of a module, by the module's name.
        torch_products: Functions of torch that multiply, by the name of the module that calls them.
            Rows of such a module may depend on the batch, see ``docs/same_bits.md``.
        norm_sizes: Row sizes of the norms that may compute the sum that they read.
    """

    attention: tuple[AttentionLayer, ...]
    recurrent: tuple[RecurrentLayer, ...]
    indexers: tuple[IndexLayer, ...] = ()
    replaced: Mapping[str, str] = field(default_factory=dict)
    torch_products: Mapping[str, str] = field(default_factory=dict)
    norm_sizes: frozenset[int] = frozenset()


def output_head(model: PreTrainedModel) -> nn.Linear:
    """Return the module that computes the logits; its weight may have the rows of one rank."""
    head: nn.Linear = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    return head


def head_shape(model: PreTrainedModel) -> tuple[int, int]:
    """Return the columns of the head and of its input: vocabulary and hidden size."""
    head = output_head(model)
    return head.out_features, head.in_features


def decoder_layers(model: PreTrainedModel, layout: ModelLayout) -> nn.ModuleList:
    """Return the layers of the decoder: the list of modules that contains those of the layout.

    Raises:
        ConfigError: No list of modules contains all of them.
    """
    names = [layer.name for layer in layout.attention]
    names += [layer.name for layer in layout.recurrent]
    for path, module in model.named_modules():
        prefix = f"{path}."
        if isinstance(module, nn.ModuleList) and all(name.startswith(prefix) for name in names):
            return module
    raise ConfigError(
        f"{type(model).__name__} has no list of layers with all of {', '.join(names)}, whose "
        "hidden states the draft model could read.",
        field="draft",
    )
