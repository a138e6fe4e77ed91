"""Base of the backends over a paged KV pool.

Suffixes: T rows, N query heads, M key-value heads, D head size of keys, E head size of values.
"""

# ruff: noqa: N803, N806 - suffixes of tensor names are dimensions
from __future__ import annotations

from abc import abstractmethod
from types import NoneType
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from graphkit.buffers import AttentionInputs, AttentionMetadata
from graphkit.buffers.attention import APPENDING, EXTENDING
from graphkit.config import require_type
from graphkit.engine.attention.backend import PooledAttention
from graphkit.engine.attention.cache import PagedCache, Pool
from graphkit.engine.attention.query_rows import query_rows
from graphkit.engine.kv import MHATokenToKVPool, MLATokenToKVPool, ReqToTokenPool
from graphkit.errors import ConfigError
from graphkit.ops.paged_metadata import Metadata, paged_metadata
from graphkit.ops.registration import OPS

if TYPE_CHECKING:
    from graphkit.config import BufferSizes
    from graphkit.engine.attention.absorbed import LatentHeads
    from graphkit.engine.kv.pool import TokenToKVPool
    from graphkit.ops.heads import ProjectedHeads
    from graphkit.spec.modes import ForwardMode


class PagedAttention(PooledAttention):
    """Stores this step's keys and values in the pool, then attends over the pool.

    Args:
        req_to_token_pool: Slots of each request.
        kv_pool: Keys and values by slot, or latents for multi-head latent attention with absorbed
            projections, on the same device.
        scale: Factor on the scores; by default ``head_dim ** -0.5``. A pool of latents has no
            default, since its rows are longer than the heads that the model was trained with.
        window_req_to_token_pool: Slots of each request in ``window_kv_pool``. With
            ``req_to_token_pool`` itself, a token has the same slot in both pools. A table of its
            own lets a scheduler reuse the slots of tokens that have left the window;
            ``SpeculativeEngine`` and ``SpecStepRunner`` fill and read one table alone, and refuse
            it.
        window_kv_pool: A pool for layers with a window. Layers are numbered from 0 in each pool.
            Without it one pool holds all layers.

    Attributes:
        req_to_token_pool, kv_pool, window_req_to_token_pool, window_kv_pool: As passed.
        pool_types: Pools that the backend can read; a subclass for fewer overrides it.

    Raises:
        ConfigError: An argument has a wrong type or is missing, or pools are on different devices.
    """

    req_to_token_pool: ReqToTokenPool
    kv_pool: Pool
    pool_types: ClassVar[tuple[type[TokenToKVPool], ...]] = (MHATokenToKVPool, MLATokenToKVPool)

    def __init__(
        self,
        req_to_token_pool: ReqToTokenPool,
        kv_pool: Pool,
        *,
        scale: float | None = None,
        window_req_to_token_pool: ReqToTokenPool | None = None,
        window_kv_pool: Pool | None = None,
    ) -> None:
        name = type(self).__name__
        # Set first: what these pools hold is named by them.
        self.req_to_token_pool = req_to_token_pool
        self.kv_pool = kv_pool
        self.window_req_to_token_pool = window_req_to_token_pool
        self.window_kv_pool = window_kv_pool
        self._cache = self._window_cache = PagedCache(req_to_token_pool, kv_pool)
        self._cache.check(name, self.pool_types, "")
        require_type(name, "scale", scale, (int, float, NoneType), "a number or None")
        if window_req_to_token_pool is not None or window_kv_pool is not None:
            self._window_cache = PagedCache(window_req_to_token_pool, window_kv_pool)  # type: ignore[arg-type]  # checked next
            self._window_cache.check(name, self.pool_types, "window_")
        if scale is None:
            if isinstance(kv_pool, MLATokenToKVPool):
                raise ConfigError(
                    f"{name} needs a scale with an {type(kv_pool).__name__}: pass the model's, "
                    "(qk_nope_head_dim + qk_rope_head_dim) ** -0.5.",
                    field="scale",
                )
            scale = kv_pool.head_dim**-0.5
        self.scale = scale
        self._max_context_len: int | None = None

    @property
    def max_context_len(self) -> int:
        """Upper bound of ``cache_seqlens``, from ``init_state`` or else from the pool."""
        return self._max_context_len or self.req_to_token_pool.max_context_len

    def supports(self, mode: ForwardMode) -> bool:
        """Return whether attention knows the mode; see ``AttentionBackend.supports``."""
        return mode in APPENDING + EXTENDING

    def init_state(self, sizes: BufferSizes, max_tokens: int) -> None:  # noqa: ARG002
        """Note the largest context; allocates nothing, since metadata is in each graph's pool.

        Raises:
            ConfigError: ``sizes`` and the pools disagree.
        """
        longest, page_size = self.req_to_token_pool.max_context_len, self.kv_pool.page_size
        if sizes.max_context_len > longest:
            raise ConfigError(
                f"BufferSizes.max_context_len is {sizes.max_context_len}, but req_to_token_pool "
                f"holds {longest} tokens per request. Make the pool wider or the sizes smaller.",
                field="max_context_len",
            )
        if sizes.page_size != page_size:
            raise ConfigError(
                f"BufferSizes.page_size is {sizes.page_size}, but kv_pool has pages of "
                f"{page_size}. Give both the same page_size.",
                field="page_size",
            )
        self._max_context_len = max(self._max_context_len or 0, sizes.max_context_len)

    def metadata(self, mode: ForwardMode, inputs: AttentionInputs) -> AttentionMetadata:
        """Compute the metadata by one ``graphkit::paged_metadata``.

        DECODE, TARGET_VERIFY and DRAFT append the batch's rows to ``seq_lens`` keys. In the extend
        modes ``seq_lens`` includes them: DRAFT_EXTEND has ``num_accepted_tokens`` rows per request,
        packed, at most ``tokens_per_request``; DRAFT_EXTEND_V2 the same number for each request. A
        batch of no requests has empty metadata in every mode.

        Raises:
            AttentionError: The mode has no metadata, or rows, requests and mask contradict each
                other.
        """
        rows = query_rows(mode, inputs)

        def lengths_and_table(cache: PagedCache) -> Metadata:
            page_size = cache.pool.page_size
            return paged_metadata(
                inputs.req_pool_indices, inputs.seq_lens, cache.requests.req_to_token, page_size,
                -(-self.max_context_len // page_size), rows.width, rows.appended, rows.lengths,
            )  # fmt: skip

        cache_seqlens, cu_seqlens_q, cu_seqlens_k, page_table = lengths_and_table(self._cache)
        window_page_table = page_table
        if not self._window_cache.shares_pages(self._cache):
            *_, window_page_table = lengths_and_table(self._window_cache)
        return AttentionMetadata(
            cache_seqlens=cache_seqlens,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
            page_table=page_table,
            window_page_table=window_page_table,
            mask=rows.mask,
            max_seqlen_q=rows.width,
            max_seqlen_k=self.max_context_len,
        )

    def attend(
        self,
        layer: int,
        query_TND: torch.Tensor,
        key_TMD: torch.Tensor,
        value_TME: torch.Tensor,
        out_cache_loc_T: torch.Tensor,
        metadata: AttentionMetadata,
        *,
        window: int = 0,
        softcap: float = 0.0,
        sinks_N: torch.Tensor | None = None,
        chunked: bool = False,
    ) -> torch.Tensor:
        """Store this step's keys and values, then attend from every row to its visible keys.

        The positions before a request's rows hold keys that earlier calls stored: on CUDA they are
        read while this call stores its own. Enqueues on the current stream. Never synchronises; may
        be captured.

        Args:
            layer: Layer of ``kv_pool``, or of ``window_kv_pool`` with a window.
            query_TND: Query rows.
            key_TMD: Keys of the rows; with a pool of latents the latents.
            value_TME: Their values; with a pool of latents the rotated part of their keys.
            out_cache_loc_T: Slots of the rows in that pool.
            metadata: Metadata of the batch.
            window: Most keys that a row sees, its own included; 0 for all. See
                ``paged_attention``, like the next three.
            softcap: Bound of the scores; 0 for none.
            sinks_N: A further score per query head.
            chunked: Whether a row sees the keys of its own chunk of ``window`` positions alone.

        Shapes:
            query_TND: [T, N, D]; returns [T, N, E] of its dtype. key_TMD: [T, M, D].
            value_TME: [T, M, E], E = D. out_cache_loc_T: [T] int64. sinks_N: [N].
            With a pool of latents, of rank R and rotated size P: query_TND [T, N, R + P], the
            rotated part last, key_TMD [T, 1, R], value_TME [T, 1, P]; returns [T, N, R].

        Raises:
            AttentionError: There is no such layer, a tensor has the wrong shape, dtype or device,
                or a number is out of range.
        """
        self.store(layer, key_TMD, value_TME, out_cache_loc_T, window=window)
        return self.attend_stored(
            layer, query_TND, metadata,
            window=window, softcap=softcap, sinks_N=sinks_N, chunked=chunked,
        )  # fmt: skip

    def attend_projected(
        self,
        layer: int,
        heads: ProjectedHeads,
        out_cache_loc_T: torch.Tensor,
        metadata: AttentionMetadata,
        **options: Any,
    ) -> torch.Tensor:
        """Rotate this step's heads, then store and attend as ``attend`` does.

        With a pool of keys and values, one kernel rotates the heads and stores them. That kernel
        has no gradient: where one is needed, ``attend`` runs instead, as it does in a subclass that
        overrides ``attend`` or ``store``.

        Args:
            layer: See ``attend``, like ``options``.
            heads: The projected rows, and how to rotate them.
            out_cache_loc_T: Slots of the rows.
            metadata: Metadata of the batch.
            **options: ``window``, ``softcap``, ``sinks_N`` and ``chunked``.

        Shapes:
            out_cache_loc_T: [T] int64. Returns [T, N, D] of the rows' dtype.

        Raises:
            AttentionError: See ``attend``.
        """
        tensors = heads.qkv, heads.query_weight, heads.key_weight
        if not self._stores_by_ops(*tensors):
            return self.attend(layer, *heads.rotated(), out_cache_loc_T, metadata, **options)
        cache = self._cache_of(options.get("window", 0))
        query_TND = cache.store_rotated(layer, out_cache_loc_T, heads)
        return self.attend_stored(layer, query_TND, metadata, **options)

    def attend_latents(
        self,
        layer: int,
        heads: LatentHeads,
        out_cache_loc_T: torch.Tensor,
        metadata: AttentionMetadata,
        **options: Any,
    ) -> torch.Tensor:
        """Normalise and rotate this step's rows, then store and attend; see ``attend_projected``.

        The pool is one of latents.

        Shapes:
            out_cache_loc_T: [T] int64. Returns the attended values, [T, N, V].
        """
        cache = self._cache_of(options.get("window", 0))
        tensors = heads.query, heads.latents, heads.weight
        if cache.stores_by_ops and self._stores_by_ops(*tensors):
            query_TND = heads.store(cache.pool.get_key_buffer(layer), out_cache_loc_T)
            attended = self.attend_stored(layer, query_TND, metadata, **options)
        else:
            query_TND, latent_T1R, key_T1E = heads.rotated()
            query_TND = heads.projections.query(query_TND)
            attended = self.attend(
                layer, query_TND, latent_T1R, key_T1E, out_cache_loc_T, metadata, **options
            )
        return heads.projections.value(attended)

    def _stores_by_ops(self, *tensors: torch.Tensor | None) -> bool:
        """Return whether ops without gradients store rows that these tensors make."""
        needs_grad = torch.is_grad_enabled() and any(
            tensor is not None and tensor.requires_grad for tensor in tensors
        )
        own = type(self).attend, type(self).store
        return not needs_grad and own == (PagedAttention.attend, PagedAttention.store)

    def _cache_of(self, window: int) -> PagedCache:
        """Return the cache of layers with a window, or of the others."""
        return self._window_cache if window else self._cache

    def attend_stored(
        self,
        layer: int,
        query_TND: torch.Tensor,
        metadata: AttentionMetadata,
        *,
        window: int = 0,
        softcap: float = 0.0,
        sinks_N: torch.Tensor | None = None,
        chunked: bool = False,
        follows_store: bool = True,
    ) -> torch.Tensor:
        """Attend from every row to keys and values that are stored before; see ``attend``.

        ``follows_store`` says whether ``store`` of these rows is the last one on this stream.
        """
        cache, pool = self._cache_of(window), self._cache_of(window).pool
        has_usual_store = type(self).store is PagedAttention.store
        return self._attend(
            OPS["paged_attention"].arguments(
                query_TND, pool.get_key_buffer(layer), pool.get_value_buffer(layer),
                metadata.window_page_table if window else metadata.page_table,
                metadata.cache_seqlens, metadata.cu_seqlens_q, metadata.mask, self.scale,
                pool.page_size, metadata.max_seqlen_q, window, softcap, sinks_N,
                *pool.get_scales(layer), chunked,
                follows_store=follows_store and has_usual_store and cache.stores_by_ops,
            )
        )  # fmt: skip

    def attend_positions(
        self,
        layer: int,
        query_TND: torch.Tensor,
        position_TK: torch.Tensor,
        metadata: AttentionMetadata,
        *,
        softcap: float = 0.0,
        sinks_N: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend from every row to some keys of its request, which are stored before.

        Enqueues on the current stream. Never synchronises; may be captured.

        Args:
            layer: Layer of ``kv_pool``.
            query_TND: Query rows.
            position_TK: Positions of the keys of each row in its request; -1 behind the last one.
            metadata: Metadata of the batch.
            softcap: See ``attend``, like the next.
            sinks_N: A further score per query head.

        Shapes:
            query_TND: [T, N, D]. position_TK: [T, K] int64. Returns as ``attend``.

        Raises:
            AttentionError: There is no such layer, or a tensor has the wrong shape, dtype or
                device.
        """
        pool, starts = self.kv_pool, metadata.cu_seqlens_q
        row_T1 = torch.arange(len(position_TK) + 1, dtype=starts.dtype, device=starts.device)
        request_T = torch.searchsorted(starts[1:].contiguous(), row_T1[:-1], right=True)
        # A row of no request has no key, so that any request's pages do for it.
        request_T = request_T.clamp(max=max(len(starts) - 2, 0))
        key_TK = position_TK.clamp(min=0)
        page_TK = metadata.page_table[request_T].gather(1, key_TK // pool.page_size)
        slots_TK = page_TK * pool.page_size + (key_TK % pool.page_size).int()
        is_key_TK = position_TK >= 0
        # Every row is a request of its own, and its slots are pages of one slot.
        return self._attend(
            OPS["paged_attention"].arguments(
                query_TND, pool.get_key_buffer(layer), pool.get_value_buffer(layer),
                slots_TK.masked_fill(~is_key_TK, 0), is_key_TK.sum(1, dtype=torch.int32), row_T1,
                None, self.scale, 1, 1, 0, softcap, sinks_N, *pool.get_scales(layer),
            )
        )  # fmt: skip

    def store(
        self,
        layer: int,
        key_TMD: torch.Tensor,
        value_TME: torch.Tensor,
        out_cache_loc_T: torch.Tensor,
        *,
        window: int = 0,
    ) -> None:
        """Store keys and values of rows that do not attend. Arguments as for ``attend``."""
        self._cache_of(window).store(layer, out_cache_loc_T, key_TMD, value_TME)

    @abstractmethod
    def _attend(self, args: Any) -> torch.Tensor:
        """Attend over one layer, which already holds this step's rows.

        Args:
            args: Arguments of ``graphkit.ops.paged_attention``, whose contract this is.
        """
