"""Batches of the attention benchmark: one paged pool, its requests, and dense copies of them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace

import torch
from torch.nn.functional import scaled_dot_product_attention

from graphkit.buffers import AttentionMetadata
from graphkit.engine.attention import PagedAttention, SdpaAttention, TritonAttention
from graphkit.engine.kv import MHATokenToKVPool, MLATokenToKVPool, ReqToTokenPool
from graphkit.ops.kernels.attention_config import AttentionConfig
from graphkit.ops.paged_attention import paged_attention
from graphkit.ops.registration import OPS
from graphkit.spec import ForwardMode

DTYPE = torch.bfloat16
COLD_BYTES = 256 << 20
"""Least bytes of a pool: several times the L2 cache of an H200, which then does not help."""
USUAL_ROWS = 4
"""Rows of a request in most conditions. Names of conditions say other numbers."""


@dataclass(frozen=True)
class Shape:
    """Heads of a layer.

    Attributes:
        name: Name in reports.
        heads: Query heads.
        kv_heads: Key-value heads.
        key_dim: Elements of a key.
        latent: Elements of a key that are its value; 0 if values are apart, of the key's size.
        dtype: Data type of the cache.
    """

    name: str
    heads: int
    kv_heads: int
    key_dim: int
    latent: int = 0
    dtype: torch.dtype = DTYPE

    @property
    def slot_bytes(self) -> int:
        """Bytes of a token in the cache of one layer."""
        return self.kv_heads * self.key_dim * (1 if self.latent else 2) * self.dtype.itemsize


GQA, MLA = Shape("", 32, 8, 128), Shape("MLA, ", 128, 1, 576, 512)
FP8 = Shape("FP8, ", 32, 8, 128, dtype=torch.float8_e4m3fn)


@dataclass(frozen=True)
class Condition:
    """What a batch looks like.

    Attributes:
        context: Keys of each request, this step's rows included.
        batch_size: Requests.
        tree: Whether a mask says which of this step's rows each row sees.
        page_size: Slots per page.
        shape: Heads of a layer.
        rows: Rows of each request.
    """

    context: int
    batch_size: int
    tree: bool
    page_size: int
    shape: Shape = GQA
    rows: int = USUAL_ROWS

    def __str__(self) -> str:
        """Return its name in reports."""
        context = f"{self.context // 1024}k" if self.context >= 1024 else str(self.context)
        kind = "decode" if self.rows == 1 else "tree" if self.tree else "chain"
        if self.rows not in (1, USUAL_ROWS):
            kind += f" of {self.rows}"
        where = f"batch {self.batch_size}, {kind}, page size {self.page_size}"
        return f"{self.shape.name}{context} context, {where}"

    @property
    def cache_bytes(self) -> int:
        """Bytes of the cache that one call reads."""
        return self.batch_size * self.context * self.shape.slot_bytes

    @property
    def products(self) -> int:
        """Floating-point operations of the matrix products of one call."""
        dims = self.shape.key_dim + (self.shape.latent or self.shape.key_dim)
        return 2 * self.batch_size * self.rows * self.shape.heads * self.context * dims


class Batch:
    """A verify batch over layers with random keys and values in randomly ordered pages.

    Attributes:
        condition: What it looks like.
        layers: Layers of the pool, enough for ``COLD_BYTES``.
    """

    def __init__(self, condition: Condition, device: torch.device) -> None:
        self.condition, self.device = condition, device
        shape, rows = condition.shape, condition.rows
        context, batch, page_size = condition.context, condition.batch_size, condition.page_size
        cold = COLD_BYTES if device.type == "cuda" else 1
        self.layers = -(-cold // condition.cache_bytes)
        pages = batch * -(-context // page_size)
        common = (pages * page_size, page_size, shape.dtype)
        if shape.latent:
            dims = (shape.latent, shape.key_dim - shape.latent)
            self.pool = MLATokenToKVPool(*common, *dims, self.layers, device)
        else:
            dims = (shape.kv_heads, shape.key_dim)
            self.pool = MHATokenToKVPool(*common, *dims, self.layers, device)
        for tensor in self.pool.tensors().values():  # bytes in a pool of FP8
            rows_of_layer = torch.randn(tensor.shape, device=device).to(shape.dtype)
            tensor.copy_(rows_of_layer.view(tensor.dtype))
        self.requests = ReqToTokenPool(batch + 1, context, device)
        order = torch.randperm(pages, device=device).view(batch, -1, 1) + 1
        slots = (order * page_size + torch.arange(page_size, device=device)).flatten(1)[:, :context]
        self.requests.req_to_token[1 : batch + 1] = slots.int()
        self.slots, self.loc = slots, slots[:, context - rows :].flatten()
        self.query = torch.randn(batch * rows, shape.heads, shape.key_dim, device=device).to(DTYPE)
        sizes = dims if shape.latent else (shape.key_dim, shape.key_dim)
        self.new = [
            torch.randn(batch * rows, shape.kv_heads, size, device=device).to(DTYPE)
            for size in sizes
        ]
        mask = torch.eye(rows, dtype=torch.bool, device=device)
        mask[:, 0] = True
        self.mask = mask.expand(batch, rows, rows).contiguous() if condition.tree else None
        backend = self.backend(TritonAttention)
        self._metadata = self.metadata(backend)
        # The op reads early what was written before the last store.
        self.attend(backend, self._metadata, 0)

    def backend(self, kind: type[PagedAttention]) -> PagedAttention:
        """Return a backend over the pools."""
        return kind(self.requests, self.pool, scale=self.condition.shape.key_dim**-0.5)

    def metadata(self, backend: PagedAttention) -> AttentionMetadata:
        """Return the metadata of the batch, which all layers share."""
        batch, rows = self.condition.batch_size, self.condition.rows
        inputs = SimpleNamespace(
            req_pool_indices=torch.arange(1, batch + 1, device=self.device),
            seq_lens=torch.full((batch,), self.condition.context - rows, device=self.device).int(),
            batch_size=batch,
            num_tokens=batch * rows,
            tokens_per_request=rows,
            custom_mask=self.mask,
        )
        return backend.metadata(ForwardMode.TARGET_VERIFY, inputs)

    def attend(self, backend: PagedAttention, metadata: AttentionMetadata, layer: int) -> None:
        """Store and attend by a backend."""
        backend.attend(layer, self.query, *self.new, self.loc, metadata)

    def op_args(self, layer: int, row_invariant: bool = False) -> tuple[object, ...]:
        """Return the arguments of ``paged_attention`` for one layer."""
        seen = self._metadata
        return (
            self.query, self.pool.get_key_buffer(layer), self.pool.get_value_buffer(layer),
            seen.page_table, seen.cache_seqlens, seen.cu_seqlens_q, seen.mask,
            self.condition.shape.key_dim**-0.5, self.condition.page_size, seen.max_seqlen_q, 0, 0.0,
            None, *self.pool.get_scales(layer), False, True, row_invariant,
        )  # fmt: skip

    def run_op(self, row_invariant: bool, layer: int) -> None:
        """Attend by ``graphkit::paged_attention`` alone."""
        paged_attention(*self.op_args(layer, row_invariant))  # type: ignore[arg-type]

    def launch(self, layer: int, config: AttentionConfig, splits: int | None) -> torch.Tensor:
        """Attend by the CUDA kernel with a given configuration."""
        op = OPS["paged_attention"]
        out: torch.Tensor = op.launch(op.arguments(*self.op_args(layer)), splits, config)
        return out

    @cached_property
    def dense(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values of each layer without pages, [B, M, L, D]; a latent is in its key."""
        latent = self.condition.shape.latent
        copies = []
        for layer in range(self.layers):
            keys = self._without_pages(self.pool.get_key_buffer(layer))
            values = keys[..., :latent]
            if not latent:
                values = self._without_pages(self.pool.get_value_buffer(layer))
            copies.append((keys, values))
        return copies

    def _without_pages(self, buffer: torch.Tensor) -> torch.Tensor:
        return buffer.to(DTYPE)[self.slots].transpose(1, 2).contiguous()

    @cached_property
    def dense_rows(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Rows of the query heads of each key-value head, [B, M, W * G, D], and their mask.

        The rows of a chain see all keys: torch then takes its fastest kernel, which reads the same
        bytes.
        """
        batch, context, rows = (
            self.condition.batch_size, self.condition.context, self.condition.rows,
        )  # fmt: skip
        shape = self.condition.shape
        query = self.query.view(batch, rows, shape.kv_heads, -1, shape.key_dim)
        query = query.permute(0, 2, 1, 3, 4).reshape(batch, shape.kv_heads, -1, shape.key_dim)
        if self.mask is None:
            return query, None
        seen = torch.ones(batch, rows, context, dtype=torch.bool, device=self.device)
        seen[:, :, context - rows :] = self.mask
        return query, seen.repeat_interleave(shape.heads // shape.kv_heads, 1)[:, None]

    def run_dense(self, layer: int) -> None:
        """Attend by torch over the dense copies."""
        query, mask = self.dense_rows
        scaled_dot_product_attention(query, *self.dense[layer], attn_mask=mask)


BACKENDS: tuple[type[PagedAttention], ...] = (TritonAttention, SdpaAttention)
