"""Indexers of a transformers model over pools of index keys.

An indexer selects the keys that a row attends to (DeepSeek Sparse Attention). In transformers it
knows one sequence per row of its batch, and keeps its keys in the cache of the model. Here its
batch is the requests of a step, padded to the most rows of one, and the cache returns the index
keys of each request.

Suffixes: B requests, W most rows of a request, T rows, L positions, I elements of an index key, K
selected keys.
"""

# ruff: noqa: N806 - suffixes of tensor names are dimensions
from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel

from graphkit.models.cache import IndexCache
from graphkit.models.layout import IndexLayer, ModelLayout
from graphkit.models.running import SelectedKeys, running_forward


def pass_mask(model: PreTrainedModel, layout: ModelLayout) -> None:
    """Pass a mask to a model with indexers, whose layers read it before they select; in place.

    It hides no key. A mask of four dimensions reaches the layers as it is.
    """
    if layout.indexers:
        mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=model.device)
        model.forward = partial(model.forward, attention_mask=mask)


def convert_indexers(model: PreTrainedModel, layout: ModelLayout) -> None:
    """Let the indexers of a model run over the pools of the running batch; in place."""
    modules = dict(model.named_modules())
    for number, layer in enumerate(layout.indexers):
        module = modules[layer.name]
        module.forward = PooledIndexer(module.forward, layer, number)


class PooledIndexer:
    """An indexer over the index keys of the running batch.

    Args:
        forward: Forward of the indexer.
        layer: The indexer.
        number: Its index among the indexers.
    """

    def __init__(self, forward: Callable[..., Any], layer: IndexLayer, number: int) -> None:
        self._forward, self._layer, self._number = forward, layer, number

    def __call__(self, *args: Any, **kwargs: Any) -> SelectedKeys:
        """Return the keys that rows select.

        Takes the arguments of the indexer, whose rows are [1, T, ...] and whose mask is boolean.
        """
        batch = running_forward().index
        assert batch is not None, "the forward of a model with indexers has index keys"
        layout, rows = batch.layout, len(batch.out_cache_loc)

        def by_request(argument: torch.Tensor) -> torch.Tensor:
            if argument.dtype == torch.bool:
                return layout.visible_BWL
            return layout.pad(argument[0]) if argument.shape[:2] == (1, rows) else argument

        args, kwargs = tree_map_only(torch.Tensor, by_request, (args, kwargs))
        kwargs[self._layer.cache_argument] = IndexCache(
            *batch.pools[self._number], layout, batch.out_cache_loc
        )
        position_BWK = self._forward(*args, **kwargs).long()
        is_seen_BWK = layout.visible_BWL.gather(2, position_BWK)
        position_BWK = position_BWK.masked_fill(~is_seen_BWK, -1).sort(descending=True).values
        return SelectedKeys(layout.pack(position_BWK + 1) - 1)
