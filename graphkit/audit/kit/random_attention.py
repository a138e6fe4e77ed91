"""Random paged batches for attention backends.

Shape letters: B requests, pads included, T rows, M key-value heads, D head size of keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor

from graphkit.audit.kit.attention_batch import AttentionBatch, BatchInputs
from graphkit.buffers.attention import EXTENDING
from graphkit.engine.kv import MHATokenToKVPool, MLATokenToKVPool, ReqToTokenPool
from graphkit.spec import ForwardMode

KVPool = MHATokenToKVPool | MLATokenToKVPool
_LAYER = 1
"""Layer of the pools that holds the histories, of two."""


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
        heads: Query heads.
        kv_heads: Key-value heads; with latents there is one.
        head_dim: Elements of a key.
        latent: Elements of a key that are its value; 0 for a pool of keys and values.
        page_size: Slots per page.
        dtype: Dtype of queries, keys and values.
        device: Device of pools and tensors.
        window: Keys that a row sees at most; 0 for all. This and the rest are options of
            ``PagedAttention.attend``.
        chunked: Whether the window begins at its multiples.
        softcap: Bound of the scores; 0 for none.
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

    @property
    def own_rows(self) -> list[int]:
        """Rows of each live request."""
        return list(self.rows or [self.width] * len(self.lengths))

    @property
    def num_keys(self) -> list[int]:
        """Keys of each live request, its own rows included."""
        return [length + n for length, n in zip(self.lengths, self.own_rows, strict=True)]

    def batch(self, seed: int = 0) -> AttentionBatch:
        """Create a batch of random numbers.

        Every slot that no live row may read holds NaN, and so do the rows of pads.
        """
        random, device = Generator().manual_seed(seed), self.device
        num_pages = sum(map(self._pages, self.num_keys)) + 2
        num_requests = len(self.lengths) + self.pads
        num_rows = num_requests * self.width
        pool = self._pool(num_pages)
        context = self.context or max(self.lengths, default=1) + self.width
        requests = ReqToTokenPool(num_requests + 1, context, device)
        pool_rows = requests.alloc(len(self.lengths) + 1)[1:][::-1]
        key, value = self._keys_and_values(num_rows, random)
        live = sum(self.own_rows)
        key[live:], value[live:] = torch.nan, torch.nan
        histories = [self._keys_and_values(length, random) for length in self.lengths]
        out_cache_loc = torch.zeros(num_rows, dtype=torch.int64)
        free, first = (torch.randperm(num_pages, generator=random) + 1).tolist(), 0
        for row, history, num_keys in zip(pool_rows, histories, self.num_keys, strict=True):
            slots = self._slots([free.pop() for _ in range(self._pages(num_keys))], num_keys)
            before, own = slots.split([len(history[0]), num_keys - len(history[0])])
            requests.req_to_token[row, :num_keys] = slots.int().to(device)
            out_cache_loc[first : first + len(own)] = own
            pool.get_key_buffer(_LAYER)[before] = history[0].to(device)
            pool.get_value_buffer(_LAYER)[before] = history[1].to(device)
            first += len(own)
        query = torch.randn(num_rows, self.heads, self.head_dim, generator=random)
        key = key.to(device)
        return AttentionBatch(
            mode=self.mode,
            requests=requests,
            pool=pool,
            inputs=self._inputs(pool_rows, random),
            query=query.to(device, self.dtype),
            key=key,
            value=key[..., : self.latent] if self.latent else value.to(device),
            out_cache_loc=out_cache_loc.to(device),
            histories=histories,
            own_rows=self.own_rows,
            options=self._options(random),
            layer=_LAYER,
        )

    def _inputs(self, pool_rows: Sequence[int], random: Generator) -> BatchInputs:
        """Return what a backend reads of the inputs of live requests in those rows of the pool."""
        num_requests = len(self.lengths) + self.pads
        columns = self.columns or self.width
        masks = [_tree(self.width, columns, random) for _ in self.lengths]
        masks += [torch.zeros(self.width, columns, dtype=torch.bool)] * self.pads
        lengths = self.num_keys if self.mode in EXTENDING else list(self.lengths)
        ones = [1] * self.pads
        return BatchInputs(
            req_pool_indices=torch.tensor([*pool_rows, *[0] * self.pads], device=self.device),
            seq_lens=torch.tensor(lengths + ones, dtype=torch.int32, device=self.device),
            num_accepted_tokens=torch.tensor(self.own_rows + ones, device=self.device).int(),
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

    def _pages(self, num_keys: int) -> int:
        """Return the pages of so many keys."""
        return -(-num_keys // self.page_size)

    def _slots(self, pages: Sequence[int], count: int) -> Tensor:
        """Return the first slots of some pages, int64 [count]."""
        first = torch.tensor(pages, dtype=torch.int64)[:, None] * self.page_size
        return (first + torch.arange(self.page_size)).flatten()[:count]

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
