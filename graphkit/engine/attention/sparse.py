"""Attention of each row over the keys that an indexer selects.

Suffixes: T rows, N query heads, X index heads, I elements of an index key, R rank of the latents,
E elements of the rotated part, K selected keys, L keys.
"""

# ruff: noqa: N803, N806 - suffixes of tensor names are dimensions
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from graphkit.buffers import AttentionMetadata
from graphkit.config import require_int
from graphkit.engine.attention.paged import PagedAttention
from graphkit.engine.attention.paged_backends import TritonAttention
from graphkit.engine.kv import DSATokenToKVPool, ReqToTokenPool
from graphkit.ops.index_scores import index_scores


@dataclass(frozen=True)
class IndexRows:
    """What the indexer of a layer computes for the rows of a step.

    Attributes:
        query: Index queries, rotated; [T, X, I].
        weights: Weights of the heads with the model's scale factors; [T, X].
        key: Index keys, rotated, which later steps are scored against; [T, I].
    """

    query: torch.Tensor
    weights: torch.Tensor
    key: torch.Tensor


class SparseAttention(PagedAttention):
    """Attends over the latents of the ``topk`` keys of each row with the largest index scores.

    The indexer's scores and the selection run in the graph (DeepSeek Sparse Attention of
    DeepSeek-V3.2). The selected slots are a page table with pages of one slot, which another
    backend reads. Index keys are quantised to eight bits by ``DSATokenToKVPool``; an engine moves
    them with the latents of accepted paths.

    Args:
        req_to_token_pool: Slots of each request.
        kv_pool: Latents and index keys by slot, on the same device.
        scale: Factor on the scores of attention.
        topk: Keys that a row attends to; all that it sees if there are fewer.
        kind: Class of the backend that reads the selected slots.

    Raises:
        ConfigError: An argument has a wrong type or is out of range.
    """

    pool_types = (DSATokenToKVPool,)

    def __init__(
        self,
        req_to_token_pool: ReqToTokenPool,
        kv_pool: DSATokenToKVPool,
        *,
        scale: float,
        topk: int,
        kind: type[PagedAttention] = TritonAttention,
    ) -> None:
        super().__init__(req_to_token_pool, kv_pool, scale=scale)
        require_int(type(self).__name__, "topk", topk)
        self._index_pool, self._topk = kv_pool, topk
        self._reader = kind(req_to_token_pool, kv_pool, scale=scale)

    def attend_selected(
        self,
        layer: int,
        query_TND: torch.Tensor,
        latents_T1R: torch.Tensor,
        rotated_T1E: torch.Tensor,
        index: IndexRows,
        out_cache_loc_T: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """Store this step's latents and index keys, then attend from every row to selected keys.

        Of keys with equal scores any may be selected. Enqueues on the current stream. Never
        synchronises; may be captured.

        Args:
            layer: Layer of the pool.
            query_TND: Query rows of latents, see ``AbsorbedProjections``.
            latents_T1R: Latents of the rows.
            rotated_T1E: Rotated part of their keys.
            index: What the indexer computed for the rows.
            out_cache_loc_T: Slots of the rows.
            metadata: Metadata of the batch.

        Shapes:
            query_TND: [T, N, R + E]. latents_T1R: [T, 1, R]. rotated_T1E: [T, 1, E].
            out_cache_loc_T: [T] int64. Returns [T, N, R] of the queries' dtype.

        Raises:
            AttentionError: There is no such layer, or a tensor has the wrong shape, dtype or
                device.
        """
        pool = self._index_pool
        pool.set_index_k_buffer(layer, out_cache_loc_T, index.key)
        pool.set_mla_kv_buffer(layer, out_cache_loc_T, latents_T1R, rotated_T1E)
        scores_TL = index_scores(
            index.query, index.weights, pool.get_index_k_buffer(layer), metadata.page_table,
            metadata.cache_seqlens, metadata.cu_seqlens_q, metadata.mask, pool.page_size,
            metadata.max_seqlen_q,
        )  # fmt: skip
        best_TK, position_TK = scores_TL.topk(min(self._topk, scores_TL.shape[1]), dim=1)
        position_TK = position_TK.masked_fill(best_TK == -torch.inf, -1)
        return self.attend_positions(layer, query_TND, position_TK, metadata)

    def _attend(self, args: Any) -> torch.Tensor:
        """Attend over all keys, as in a layer without an indexer."""
        return self._reader._attend(args)
