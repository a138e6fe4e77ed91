"""Random batches for attention backends over paged pools, and the results that they must have.

Shape letters: B requests, pads included, T rows, N query heads, M key-value heads, D head size of
keys, E of values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor

from graphkit.buffers import AttentionBackend
from graphkit.buffers.attention import EXTENDING
from graphkit.config import BufferSizes
from graphkit.engine.kv import MHATokenToKVPool, MLATokenToKVPool, ReqToTokenPool
from graphkit.spec import ForwardMode

KVPool = MHATokenToKVPool | MLATokenToKVPool
_LAYER = 1
"""Layer of the pools that holds the histories, of two."""


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
    pool: KVPool
    inputs: BatchInputs
    query: Tensor
    key: Tensor
    value: Tensor
    out_cache_loc: Tensor
    histories: list[tuple[Tensor, Tensor]]
    own_rows: list[int]
    options: dict[str, Any]
    layer: int = _LAYER

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
        """Return the result of a backend, by its own ``attend`` or by that function of it."""
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
        """Compute the live rows in float64 on the CPU, one query at a time."""
        query, key, value = (tensor.cpu() for tensor in (self.query, self.key, self.value))
        shared = query.shape[1] // value.shape[1]  # consecutive query heads share a key-value head
        cap, sinks, out = self.options.get("softcap"), self.options.get("sinks_N"), []
        own = torch.arange(self.live_rows).split(self.own_rows)
        for b, (old_keys, old_values) in enumerate(self.histories):
            keys = torch.cat([old_keys, key[own[b]]]).double().repeat_interleave(shared, 1)
            values = torch.cat([old_values, value[own[b]]]).double().repeat_interleave(shared, 1)
            for i, row in enumerate(own[b].tolist()):
                sees = self.visible_keys(b, i)
                scores = torch.einsum("knd,nd->nk", keys[sees], query[row].double()) * self.scale
                scores = cap * (scores / cap).tanh() if cap else scores
                if sinks is not None:  # one more score, whose value is zero
                    scores = torch.cat([scores, sinks.cpu().double()[:, None]], 1)
                weights = scores.softmax(1)[:, : len(sees)]
                out.append(torch.einsum("nk,kne->ne", weights, values[sees]))
        return torch.stack(out)

    def visible_keys(self, b: int, i: int) -> list[int]:
        """Return the keys of live request ``b`` that its row ``i`` attends to."""
        keys, mask = len(self.histories[b][0]) + self.own_rows[b], self.inputs.custom_mask
        if mask is None:
            visible = list(range(keys - self.own_rows[b] + i + 1))
        else:  # the mask is for the last keys alone
            before = keys - mask.shape[2]
            visible = [key for key in range(keys) if key < before or mask[b, i, key - before]]
        window = self.options.get("window", 0)
        if self.options.get("chunked"):
            window = (len(visible) - 1) % window + 1
        return visible[-window:]  # all without a window, since -0 is 0


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """What a random batch is like: its requests and rows, heads and pools, and options.

    Attributes:
        lengths: Keys of each live request before its own rows.
        mode: Mode of the batch.
        rows: Rows of each live request; ``None`` for ``width``.
        width: Most rows of a request (W).
        columns: Columns of the mask; ``None`` for W.
        tree: Whether a mask says what each row sees.
        pads: Pad requests behind the live ones.
        context: Tokens that the request pool holds per request; ``None`` for as many as needed.
        heads, kv_heads, head_dim: Query heads, key-value heads, elements of a key.
        latent: Elements of a key that are its value; 0 for a pool of keys and values.
        page_size: Slots per page.
        dtype, device: Of queries, keys, values and pools.
        window, chunked, softcap: Options of ``PagedAttention.attend``.
        sinks: Whether heads have sinks.
    """

    lengths: Sequence[int]
    mode: ForwardMode = ForwardMode.TARGET_VERIFY
    rows: Sequence[int] | None = None
    width: int = 1
    columns: int | None = None
    tree: bool = False
    pads: int = 0
    context: int | None = None
    heads: int = 2
    kv_heads: int = 2
    head_dim: int = 16
    latent: int = 0
    page_size: int = 1
    dtype: torch.dtype = torch.float32
    device: torch.device | str = "cpu"
    window: int = 0
    chunked: bool = False
    softcap: float = 0.0
    sinks: bool = False

    def batch(self, seed: int = 0) -> AttentionBatch:
        """Create a batch of random numbers.

        Every slot that no live row may read holds NaN, and so do the rows of pads.
        """
        random, device = Generator().manual_seed(seed), self.device
        own_rows = list(self.rows or [self.width] * len(self.lengths))
        all_keys = [length + rows for length, rows in zip(self.lengths, own_rows, strict=True)]
        pages = [-(-keys // self.page_size) for keys in all_keys]
        num_pages, num_requests = sum(pages) + 2, len(self.lengths) + self.pads
        num_rows, live = num_requests * self.width, sum(own_rows)
        pool = self._pool(num_pages)
        context = self.context or max(self.lengths, default=1) + self.width
        requests = ReqToTokenPool(num_requests + 1, context, device)
        pool_rows = requests.alloc(len(self.lengths) + 1)[1:][::-1]
        key, value = self._keys_and_values(num_rows, random)
        key[live:], value[live:] = torch.nan, torch.nan
        histories = [self._keys_and_values(length, random) for length in self.lengths]
        out_cache_loc = torch.zeros(num_rows, dtype=torch.int64)
        free, first = (torch.randperm(num_pages, generator=random) + 1).tolist(), 0
        for row, history, keys, count in zip(pool_rows, histories, all_keys, pages, strict=True):
            begins = torch.tensor([free.pop() for _ in range(count)], dtype=torch.int64)
            slots = begins[:, None] * self.page_size + torch.arange(self.page_size)
            slots = slots.flatten()[:keys]
            before, own = slots.split([len(history[0]), keys - len(history[0])])
            requests.req_to_token[row, :keys] = slots.int().to(device)
            out_cache_loc[first : first + len(own)] = own
            pool.get_key_buffer(_LAYER)[before] = history[0].to(device)
            pool.get_value_buffer(_LAYER)[before] = history[1].to(device)
            first += len(own)
        query = torch.randn(num_rows, self.heads, self.head_dim, generator=random)
        key = key.to(device)
        lengths = all_keys if self.mode in EXTENDING else list(self.lengths)
        return AttentionBatch(
            mode=self.mode,
            requests=requests,
            pool=pool,
            inputs=self._inputs(pool_rows, lengths, own_rows, random),
            query=query.to(device, self.dtype),
            key=key,
            value=key[..., : self.latent] if self.latent else value.to(device),
            out_cache_loc=out_cache_loc.to(device),
            histories=histories,
            own_rows=own_rows,
            options=self._options(random),
        )

    def _inputs(
        self, pool_rows: Sequence[int], lengths: list[int], own_rows: list[int], random: Generator
    ) -> BatchInputs:
        """Return what a backend reads of the inputs of live requests in those rows of the pool."""
        num_requests, ones = len(self.lengths) + self.pads, [1] * self.pads
        columns = self.columns or self.width
        masks = [_tree(self.width, columns, random) for _ in self.lengths]
        masks += [torch.zeros(self.width, columns, dtype=torch.bool)] * self.pads
        return BatchInputs(
            req_pool_indices=torch.tensor([*pool_rows, *[0] * self.pads], device=self.device),
            seq_lens=torch.tensor(lengths + ones, dtype=torch.int32, device=self.device),
            num_accepted_tokens=torch.tensor(own_rows + ones, device=self.device).int(),
            batch_size=num_requests,
            num_tokens=num_requests * self.width,
            tokens_per_request=self.width,
            custom_mask=torch.stack(masks).to(self.device) if self.tree else None,
        )

    def _pool(self, num_pages: int) -> KVPool:
        """Create a pool whose slots all hold NaN."""
        common = num_pages * self.page_size, self.page_size, self.dtype
        pool: KVPool
        if self.latent:
            rotated = self.head_dim - self.latent
            pool = MLATokenToKVPool(*common, self.latent, rotated, 2, self.device)
        else:
            pool = MHATokenToKVPool(*common, self.kv_heads, self.head_dim, 2, self.device)
        for tensor in pool.tensors().values():
            tensor.fill_(torch.nan)
        return pool

    def _keys_and_values(self, count: int, random: Generator) -> tuple[Tensor, Tensor]:
        """Return keys [count, M, D] and their values; latents are a view of the keys."""
        shape = count, 1 if self.latent else self.kv_heads, self.head_dim
        key, value = (torch.randn(shape, generator=random).to(self.dtype) for _ in "kv")
        return key, key[..., : self.latent] if self.latent else value

    def _options(self, random: Generator) -> dict[str, Any]:
        """Return the arguments of ``attend`` that differ from their defaults."""
        given = {"window": self.window, "softcap": self.softcap, "chunked": self.chunked}
        options: dict[str, Any] = {name: value for name, value in given.items() if value}
        if self.sinks:
            options["sinks_N"] = torch.randn(self.heads, generator=random).to(self.device)
        return options


def _tree(width: int, columns: int, random: Generator) -> Tensor:
    """Return a random tree: a node sees itself, its ancestors, and some of the keys before."""
    before = torch.rand(width, columns - width, generator=random) < 0.5
    mask = torch.eye(width, dtype=torch.bool)
    for node in range(1, width):
        mask[node] |= mask[int(torch.randint(node, (), generator=random))]
    return torch.cat([before, mask], 1)
