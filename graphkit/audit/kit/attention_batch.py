"""A batch for attention backends over paged pools, and the expected result, computed by loops.

Shape letters: T rows, N query heads, M key-value heads, D head size of keys, E of values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from graphkit.buffers import AttentionBackend
from graphkit.config import BufferSizes
from graphkit.engine.kv import MHATokenToKVPool, MLATokenToKVPool, ReqToTokenPool
from graphkit.spec import ForwardMode


@dataclass
class BatchInputs:
    """What a backend reads of a mode's inputs; see ``graphkit.AttentionInputs``."""

    req_pool_indices: Tensor
    seq_lens: Tensor
    num_accepted_tokens: Tensor
    batch_size: int
    num_tokens: int
    tokens_per_request: int
    custom_mask: Tensor | None


@dataclass
class AttentionBatch:
    """One batch of any mode; the live requests precede the pads.

    Attributes:
        mode: Mode of the batch.
        requests: Table of the KV slots of each request.
        pool: Keys and values of the histories, in ``layer``; its other layers hold NaN.
        inputs: What the backend computes metadata from.
        query: Rows of queries, [T, N, D].
        key: Their keys, [T, M, D].
        value: Their values, [T, M, E]; with a pool of latents the first part of the keys.
        out_cache_loc: Their slots, [T].
        histories: Keys and values of each live request before its own rows.
        own_rows: Rows of each live request in this batch. ``seq_lens`` of an extending mode counts
            them.
        options: Options of ``attend`` that differ from their defaults.
        layer: Layer of the pool.
    """

    mode: ForwardMode
    requests: ReqToTokenPool
    pool: MHATokenToKVPool | MLATokenToKVPool
    inputs: BatchInputs
    query: Tensor
    key: Tensor
    value: Tensor
    out_cache_loc: Tensor
    histories: list[tuple[Tensor, Tensor]]
    own_rows: list[int]
    options: dict[str, Any]
    layer: int = 1

    @property
    def scale(self) -> float:
        """Factor on the scores: the head size to the power of -1/2."""
        return float(self.key.shape[2] ** -0.5)

    @property
    def live_rows(self) -> int:
        """Rows of the live requests."""
        return sum(self.own_rows)

    @property
    def stored(self) -> tuple[Tensor, Tensor]:
        """Key and value arguments of ``attend``; of latents, the latent and the rotated part."""
        if isinstance(self.pool, MLATokenToKVPool):
            return self.value, self.key[..., self.value.shape[2] :]
        return self.key, self.value

    def backend(self, kind: Callable[..., Any]) -> Any:
        """Create a backend of a class over the pools."""
        return kind(self.requests, self.pool, scale=self.scale)

    def prepare(self, backend: AttentionBackend) -> None:
        """Prepare a backend for the batch, and the pads of the batch for the backend."""
        sizes = BufferSizes(
            max_batch_size=self.inputs.batch_size,
            max_context_len=self.requests.max_context_len,
            hidden_size=1,
            vocab_size=1,
            dtype=self.query.dtype,
            page_size=self.pool.page_size,
        )
        backend.init_state(sizes, self.inputs.num_tokens)
        self.inputs.seq_lens[len(self.own_rows) :] = backend.seq_len_fill_value

    def attend(self, kind: Callable[..., Any]) -> Tensor:
        """Return the result of a new backend."""
        return self.attend_by(self.backend(kind))

    def attend_by(self, backend: Any, attend: Callable[..., Any] | None = None) -> Tensor:
        """Return the result of a backend over the pools.

        Args:
            backend: The backend.
            attend: Called with the backend and the arguments of ``PagedAttention.attend``; ``None``
                calls the backend's own.
        """
        metadata = backend.metadata(self.mode, self.inputs)
        rows = (self.query, *self.stored, self.out_cache_loc)
        function = backend.attend if attend is None else partial(attend, backend)
        out: Tensor = function(self.layer, *rows, metadata, **self.options)
        return out

    def reorder(self, order: Sequence[int]) -> None:
        """Permute the requests of a batch without pads and of uniform rows, in place."""
        device, width = self.query.device, self.inputs.tokens_per_request
        index = torch.tensor(order, device=device)
        rows = (index[:, None] * width + torch.arange(width, device=device)).flatten()
        for tensor in (self.inputs.req_pool_indices, self.inputs.seq_lens, self.inputs.custom_mask):
            if tensor is not None:
                tensor.copy_(tensor[index])
        # With latents the values are a view of the keys.
        parts = {tensor.data_ptr(): tensor for tensor in (self.value, self.key)}
        for tensor in (self.query, *parts.values(), self.out_cache_loc):
            tensor.copy_(tensor[rows])
        self.histories = [self.histories[b] for b in order]

    def expected(self) -> Tensor:
        """Compute the live rows in float64 on the CPU, one query and head at a time."""
        query, key, value = (tensor.cpu() for tensor in (self.query, self.key, self.value))
        heads, kv_heads, value_dim = query.shape[1], *value.shape[1:]
        cap = self.options.get("softcap")
        sinks = self.options.get("sinks_N")
        out = torch.zeros(self.live_rows, heads, value_dim, dtype=torch.float64)
        for b, (old_keys, old_values) in enumerate(self.histories):
            first = sum(self.own_rows[:b])
            own = slice(first, first + self.own_rows[b])
            keys = torch.cat([old_keys, key[own]]).double()
            values = torch.cat([old_values, value[own]]).double()
            for i in range(self.own_rows[b]):
                sees = self.visible_keys(b, i)
                for n in range(heads):
                    m = n * kv_heads // heads  # consecutive query heads share a key-value head
                    scores = keys[sees, m] @ query[first + i, n].double() * self.scale
                    scores = cap * (scores / cap).tanh() if cap else scores
                    if sinks is not None:  # one more score, whose value is zero
                        scores = torch.cat([scores, sinks[n : n + 1].cpu().double()])
                    out[first + i, n] = scores.softmax(0)[: len(sees)] @ values[sees, m]
        return out

    def visible_keys(self, b: int, i: int) -> list[int]:
        """Return the keys of live request ``b`` that its row ``i`` attends to."""
        keys = len(self.histories[b][0]) + self.own_rows[b]
        visible = [key for key in range(keys) if self._sees(b, i, key, keys)]
        window = self.options.get("window", 0)
        if self.options.get("chunked"):
            window = (len(visible) - 1) % window + 1
        return visible[-window:]  # all without a window, since -0 is 0

    def _sees(self, b: int, i: int, key: int, num_keys: int) -> bool:
        """Return whether row ``i`` of request ``b`` attends to its key number ``key``."""
        mask = self.inputs.custom_mask
        if mask is None:
            return key <= num_keys - self.own_rows[b] + i
        column = key - (num_keys - mask.shape[2])  # the mask is for the last keys alone
        return column < 0 or bool(mask[b, i, column])
