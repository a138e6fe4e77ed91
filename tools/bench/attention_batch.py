"""Batches of the attention benchmark: one paged pool, its requests, and dense copies of them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace

import torch
from torch.nn.functional import scaled_dot_product_attention

from graphkit.attention import AttentionMetadata, PagedAttention, SdpaAttention, TritonAttention
from graphkit.kv import MHATokenToKVPool, ReqToTokenPool
from graphkit.ops.kernels.attention_config import AttentionConfig
from graphkit.ops.kernels.paged_attention import launch_paged_attention
from graphkit.ops.paged_attention import paged_attention
from graphkit.ops.registration import OPS
from graphkit.spec import ForwardMode

ROWS, HEADS, KV_HEADS, HEAD_DIM = 4, 32, 8, 128
DTYPE = torch.bfloat16
COLD_BYTES = 256 << 20
"""Least bytes of a pool: several times the L2 cache of an H200, which then does not help."""


@dataclass(frozen=True)
class Condition:
    """What a batch looks like.

    Attributes:
        context: Keys of each request, this step's rows included.
        batch_size: Requests.
        tree: Whether a mask says which of this step's rows each row sees.
        page_size: Slots per page.
    """

    context: int
    batch_size: int
    tree: bool
    page_size: int

    def __str__(self) -> str:
        """Return its name in reports."""
        context = f"{self.context // 1024}k" if self.context >= 1024 else str(self.context)
        shape = "tree" if self.tree else "chain"
        return f"{context} context, batch {self.batch_size}, {shape}, page size {self.page_size}"

    @property
    def cache_bytes(self) -> int:
        """Bytes of the keys and values that one call reads."""
        return 2 * self.batch_size * self.context * KV_HEADS * HEAD_DIM * DTYPE.itemsize


class Batch:
    """A verify batch over layers with random keys and values in randomly ordered pages.

    Attributes:
        condition: What it looks like.
        layers: Layers of the pool, enough for ``COLD_BYTES``.
    """

    def __init__(self, condition: Condition, device: torch.device) -> None:
        self.condition, self.device = condition, device
        context, batch, page_size = condition.context, condition.batch_size, condition.page_size
        cold = COLD_BYTES if device.type == "cuda" else 1
        self.layers = -(-cold // condition.cache_bytes)
        pages = batch * -(-context // page_size)
        self.pool = MHATokenToKVPool(
            pages * page_size, page_size, DTYPE, KV_HEADS, HEAD_DIM, self.layers, device
        )
        for tensor in self.pool.tensors().values():
            tensor.normal_()
        self.requests = ReqToTokenPool(batch + 1, context, device)
        order = torch.randperm(pages, device=device).view(batch, -1, 1) + 1
        slots = (order * page_size + torch.arange(page_size, device=device)).flatten(1)[:, :context]
        self.requests.req_to_token[1 : batch + 1] = slots.int()
        self.slots, self.loc = slots, slots[:, context - ROWS :].flatten()
        self.query = torch.randn(batch * ROWS, HEADS, HEAD_DIM, device=device).to(DTYPE)
        rows = (batch * ROWS, KV_HEADS, HEAD_DIM)
        self.key, self.value = (torch.randn(rows, device=device).to(DTYPE) for _ in "kv")
        mask = torch.eye(ROWS, dtype=torch.bool, device=device)
        mask[:, 0] = True
        self.mask = mask.expand(batch, ROWS, ROWS).contiguous() if condition.tree else None

    def metadata(self, backend: PagedAttention) -> AttentionMetadata:
        """Return the metadata of the batch, which all layers share."""
        batch = self.condition.batch_size
        inputs = SimpleNamespace(
            req_pool_indices=torch.arange(1, batch + 1, device=self.device),
            seq_lens=torch.full((batch,), self.condition.context - ROWS, device=self.device).int(),
            batch_size=batch,
            num_tokens=batch * ROWS,
            tokens_per_request=ROWS,
            custom_mask=self.mask,
        )
        return backend.metadata(ForwardMode.TARGET_VERIFY, inputs)

    @cached_property
    def _triton(self) -> AttentionMetadata:
        return self.metadata(TritonAttention(self.requests, self.pool))

    def attend(self, backend: PagedAttention, metadata: AttentionMetadata, layer: int) -> None:
        """Store and attend by a backend."""
        backend.attend(layer, self.query, self.key, self.value, self.loc, metadata)

    def op_args(self, layer: int) -> tuple[object, ...]:
        """Return the arguments of ``paged_attention`` for one layer."""
        seen = self._triton
        return (
            self.query, self.pool.get_key_buffer(layer), self.pool.get_value_buffer(layer),
            seen.page_table, seen.cache_seqlens, seen.cu_seqlens_q, seen.mask, HEAD_DIM**-0.5,
            self.condition.page_size, seen.max_seqlen_q,
        )  # fmt: skip

    def run_op(self, layer: int) -> None:
        """Attend by ``graphkit::paged_attention`` alone."""
        paged_attention(*self.op_args(layer))  # type: ignore[arg-type]

    def launch(self, layer: int, config: AttentionConfig, splits: int | None) -> torch.Tensor:
        """Attend by the CUDA kernel with a given configuration."""
        args = OPS["paged_attention"].arguments(*self.op_args(layer))
        return launch_paged_attention(args, splits, config)

    @cached_property
    def dense(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values of each layer without pages, [B, M, L, D]."""
        return [
            (
                self.pool.get_key_buffer(layer)[self.slots].transpose(1, 2).contiguous(),
                self.pool.get_value_buffer(layer)[self.slots].transpose(1, 2).contiguous(),
            )
            for layer in range(self.layers)
        ]

    @cached_property
    def dense_rows(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Rows of the query heads of each key-value head, [B, M, W * G, D], and their mask.

        The rows of a chain see all keys: torch then takes its fastest kernel, which reads the same
        bytes.
        """
        batch, context = self.condition.batch_size, self.condition.context
        query = self.query.view(batch, ROWS, KV_HEADS, -1, HEAD_DIM).permute(0, 2, 1, 3, 4)
        query = query.reshape(batch, KV_HEADS, -1, HEAD_DIM)
        if self.mask is None:
            return query, None
        seen = torch.ones(batch, ROWS, context, dtype=torch.bool, device=self.device)
        seen[:, :, context - ROWS :] = self.mask
        return query, seen.repeat_interleave(HEADS // KV_HEADS, 1)[:, None]

    def run_dense(self, layer: int) -> None:
        """Attend by torch over the dense copies."""
        query, mask = self.dense_rows
        scaled_dot_product_attention(query, *self.dense[layer], attn_mask=mask)


BACKENDS: tuple[type[PagedAttention], ...] = (TritonAttention, SdpaAttention)
