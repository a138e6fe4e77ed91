"""Pools and attention of one engine or target over a transformers model.

Layers with keys and values of the same shape share a pool. Most models have one such group.
Suffixes: T rows, N query heads, M key-value heads, D head size of keys, E head size of values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from inspect import isabstract
from itertools import count
from typing import Any

import torch
from torch.nn.functional import pad

from graphkit.buffers import (
    AttentionInputs,
    AttentionMetadata,
    DraftExtendInputs,
    DraftInputs,
)
from graphkit.buffers.attention import kv_pools
from graphkit.config import BufferSizes
from graphkit.engine.attention import (
    LatentHeads,
    PagedAttention,
    PooledAttention,
    SdpaAttention,
    TritonAttention,
)
from graphkit.engine.attention.cache import Pool
from graphkit.engine.kv import (
    IndexKeyPool,
    MHATokenToKVPool,
    MLATokenToKVPool,
    ReqToTokenPool,
)
from graphkit.engine.kv.pool import LayerGroupKVPool
from graphkit.errors import ConfigError, short_repr
from graphkit.models.layout import AttentionLayer, IndexLayer
from graphkit.models.running import AttentionCall, IndexBatch
from graphkit.ops.attention_layout import DenseLayout
from graphkit.ops.kv_cache import FP8
from graphkit.spec import ForwardMode


class LayerGroupAttention(PooledAttention):
    """Attention of all layers of a model, each over the pool of its group, with its own scaling.

    Args:
        requests: Slots of each request.
        layers: The layers, in the order of their indices.
        page_size: Slots per page.
        dtype: Data type of keys and values.
        indexers: Modules with index keys, in the order of their indices.
        slots: KV slots; ``None`` selects those of every request at its longest.
        kind: Backend of every group; ``None`` for the default of ``attention_class``.
        row_invariant: Whether it is row-invariant, if the backend can be. On a CPU, those that can
            be always are.
    """

    def __init__(
        self,
        requests: ReqToTokenPool,
        layers: Sequence[AttentionLayer],
        page_size: int,
        dtype: torch.dtype,
        indexers: Sequence[IndexLayer] = (),
        slots: int | None = None,
        kind: type[PagedAttention] | None = None,
        row_invariant: bool = True,
    ) -> None:
        device = requests.device
        chosen = attention_class(kind, device, row_invariant)
        tokens = all_slots(requests, page_size) if slots is None else slots
        members: dict[tuple[type[Pool], int, int], list[int]] = {}
        for number, member in enumerate(layers):
            members.setdefault(_pool_shape(member, dtype), []).append(number)
        members = members or {(MHATokenToKVPool, 1, 1): []}
        pools: list[Pool] = [
            pool(
                tokens,
                page_size,
                dtype,
                first,
                second,
                len(indices),
                device,
                **_pool_scales([layers[index] for index in indices], dtype),
            )
            for (pool, first, second), indices in members.items()
        ]
        self.req_to_token_pool = requests
        index_shapes = Counter((layer.size, layer.dtype) for layer in indexers)
        index_pools = {
            (size, dtype): IndexKeyPool(tokens, page_size, dtype, size, number, device)
            for (size, dtype), number in index_shapes.items()
        }
        index_layers = {shape: count() for shape in index_pools}
        self._indexers = tuple(
            (index_pools[shape], next(index_layers[shape]))
            for shape in ((layer.size, layer.dtype) for layer in indexers)
        )
        self.kv_pool = LayerGroupKVPool([*pools, *index_pools.values()])
        self._place: dict[int, tuple[PagedAttention, int]] = {}
        for pool, indices in zip(pools, members.values(), strict=True):
            scales = dict.fromkeys(layers[layer].scaling for layer in indices)
            groups = {scale: chosen(requests, pool, scale=scale) for scale in scales}
            for index, layer in enumerate(indices):
                self._place[layer] = groups[layers[layer].scaling], index
        self._groups = list(dict.fromkeys(group for group, _ in self._place.values()))
        self._groups = self._groups or [chosen(requests, pools[0], scale=1.0)]
        for group in self._groups:
            group.is_row_invariant &= row_invariant or device.type == "cpu"
        # An indexer scores all keys of all rows that the longest request has.
        self.skips_absent_rows = not indexers and self._groups[0].skips_absent_rows
        self.is_row_invariant = not indexers and self._groups[0].is_row_invariant

    def supports(self, mode: ForwardMode) -> bool:
        """Return whether attention knows the mode; see ``AttentionBackend.supports``."""
        return self._groups[0].supports(mode)

    def init_state(self, sizes: BufferSizes, max_tokens: int) -> None:
        """Prepare every group; see ``PagedAttention.init_state``."""
        for group in self._groups:
            group.init_state(sizes, max_tokens)

    def metadata(self, mode: ForwardMode, inputs: AttentionInputs) -> AttentionMetadata:
        """Compute the metadata, which all groups share; see ``PagedAttention.metadata``."""
        return self._groups[0].metadata(mode, inputs)

    def index_batch(
        self, out_cache_loc: torch.Tensor, metadata: AttentionMetadata, first: int = 0
    ) -> IndexBatch | None:
        """Return the index keys of a batch, from one indexer on, or ``None`` without indexers."""
        if not self._indexers:
            return None
        layout = DenseLayout(
            len(out_cache_loc), metadata.page_table, metadata.cache_seqlens, metadata.cu_seqlens_q,
            metadata.mask, self.kv_pool.page_size, metadata.max_seqlen_q,
        )  # fmt: skip
        return IndexBatch(self._indexers[first:], layout, out_cache_loc)

    def store(
        self, layer: int, key: torch.Tensor, value: torch.Tensor, out_cache_loc: torch.Tensor
    ) -> None:
        """Store keys and values, [T, M, D] each, of a layer's rows."""
        group, index = self._place[layer]
        group.store(index, key, value, out_cache_loc)

    def attend(
        self,
        layer: int,
        call: AttentionCall,
        out_cache_loc: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """Store keys and values of a layer's rows, and return the attended values, [1, T, N, E]."""
        group, index = self._place[layer]
        pool = group.kv_pool
        options: dict[str, Any] = {
            "window": call.window, "softcap": call.softcap, "sinks_N": call.sinks,
            "chunked": call.chunked,
        }  # fmt: skip
        is_of_latents = isinstance(pool, MLATokenToKVPool)
        if call.selected is not None or (isinstance(call.heads, LatentHeads) and not is_of_latents):
            call = call.rotated()
        if call.heads is not None:
            if isinstance(call.heads, LatentHeads):
                attend: Any = group.attend_latents
            else:
                attend = group.attend_projected
            attended = attend(index, call.heads, out_cache_loc, metadata, **options)
            return attended[None].contiguous()  # type: ignore[no-any-return]
        rows = call.latents
        if rows is not None and is_of_latents:
            query = rows.projections.query(call.query[0].transpose(0, 1))
            key, value = (part[0].transpose(0, 1) for part in (rows.latents, rows.rotated))
        else:
            call = call.expanded()
            parts = (call.query, call.key, call.value)
            size = pool.head_dim  # type: ignore[union-attr]
            query, key, value = (_padded_to(part[0].transpose(0, 1), size) for part in parts)
        if call.selected is None:
            attended = group.attend(index, query, key, value, out_cache_loc, metadata, **options)
        else:
            group.store(index, key, value, out_cache_loc)
            attended = group.attend_positions(
                index, query, call.selected.positions, metadata,
                softcap=call.softcap, sinks_N=call.sinks,
            )  # fmt: skip
        if call.latents is not None:
            attended = call.latents.projections.value(attended)
        return attended[None, ..., : call.value.shape[-1]].contiguous()

    def attend_stored(
        self, layer: int, query: torch.Tensor, metadata: AttentionMetadata, window: int
    ) -> torch.Tensor:
        """Return the values that queries, [T, N, D], attend to in a layer, [T, N, D].

        Stores nothing: the pools have the keys and values of all rows.
        """
        group, index = self._place[layer]
        padded = _padded_to(query, group.kv_pool.head_dim)  # type: ignore[union-attr]
        attended = group.attend_stored(index, padded, metadata, window=window, follows_store=False)
        return attended[..., : query.shape[-1]].contiguous()


class TargetKeys(LayerGroupAttention):
    """Attention over the keys and values that a target has stored. It stores none.

    Args:
        target: The target's attention, whose pools it shares.

    Raises:
        ConfigError: ``target`` is not the attention of a ``TransformersModel``.
    """

    def __init__(self, target: object) -> None:
        if not isinstance(target, LayerGroupAttention):
            raise ConfigError(
                "the draft model reads the keys and values of its target. Pass what engine_model "
                "of the target returned as target.",
                field="target",
            )
        vars(self).update(vars(target))

    def metadata(self, mode: ForwardMode, inputs: AttentionInputs) -> Any:
        """Return metadata of rows that see the keys up to their own position.

        ``None`` for draft steps: their lengths count drafts, which have no keys. See ``committed``.
        """
        return None if mode is ForwardMode.DRAFT else super().metadata(mode, inputs)

    def committed(self, inputs: DraftInputs | DraftExtendInputs, rows: int) -> AttentionMetadata:
        """Return metadata of rows that see all ``seq_lens`` keys, ``rows`` per request."""
        requests, lengths = (
            part.repeat_interleave(rows) for part in (inputs.req_pool_indices, inputs.seq_lens)
        )
        single = DraftExtendInputs(req_pool_indices=requests, seq_lens=lengths, input_ids=requests)
        return super().metadata(ForwardMode.DRAFT_EXTEND_V2, single)


def slot_bytes(attention: PooledAttention) -> int:
    """Return the bytes of one slot in all pools of a backend."""
    buffers = (buffer for pool in kv_pools(attention) for buffer in pool.tensors().values())
    return sum(buffer[0].nbytes for buffer in buffers)


def attention_class(
    attention: object, device: torch.device, row_invariant: bool
) -> type[PagedAttention]:
    """Return the attention backend that a setting selects on a device.

    ``None`` selects ``TritonAttention`` on CUDA and for row-invariant models, and otherwise
    ``SdpaAttention``, which is faster for the prompts of a CPU.

    Raises:
        ConfigError: It is neither ``None`` nor a class of backends.
    """
    if attention is None:
        return TritonAttention if device.type == "cuda" or row_invariant else SdpaAttention
    if (
        isinstance(attention, type)
        and issubclass(attention, PagedAttention)
        and not isabstract(attention)
    ):
        return attention
    raise ConfigError(
        "attention must be a class derived from graphkit.PagedAttention, such as "
        f"graphkit.TritonAttention, or None, got {short_repr(attention)}.",
        field="attention",
    )


def _pool_scales(layers: Sequence[AttentionLayer], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the scales of the heads of layers, [layers, M], if a pool of the dtype has any."""
    if dtype != FP8:
        return {}
    return {
        name: torch.tensor(
            [
                (list(getattr(layer, name) or (1.0,)) * layer.heads)[: layer.heads]
                for layer in layers
            ]
        )
        for name in ("key_scale", "value_scale")
        if any(getattr(layer, name) for layer in layers)
    }


def _pool_shape(layer: AttentionLayer, dtype: torch.dtype) -> tuple[type[Pool], int, int]:
    """Return the class of a layer's pool, and its two sizes.

    A pool of heads has one size for keys and values. In eight bits there are no pools of latents.
    """
    latent = layer.latent
    if latent is not None and dtype in MLATokenToKVPool.dtypes:
        return MLATokenToKVPool, latent.rank, latent.rotated_size
    return MHATokenToKVPool, layer.heads, max(layer.key_size, layer.value_size)


def all_slots(requests: ReqToTokenPool, page_size: int) -> int:
    """Return the KV slots of every request at its longest, in whole pages."""
    return requests.size * -(-requests.max_context_len // page_size) * page_size


def _padded_to(rows: torch.Tensor, size: int) -> torch.Tensor:
    """Return rows with zeros behind the elements of their heads, up to ``size`` elements."""
    return rows if rows.shape[-1] == size else pad(rows, (0, size - rows.shape[-1]))
