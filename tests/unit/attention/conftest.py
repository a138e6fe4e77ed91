"""Paged batches with NaN wherever no live row may look, and the answer by plain loops."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from graphkit.kv import MHATokenToKVPool, ReqToTokenPool


@dataclass
class Case:
    """One decode or verify batch; the live requests stand before the pads."""

    requests: ReqToTokenPool
    pool: MHATokenToKVPool
    inputs: SimpleNamespace
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    out_cache_loc: torch.Tensor
    histories: list[tuple[torch.Tensor, torch.Tensor]]
    layer: int = 1

    @property
    def live_rows(self) -> int:
        return len(self.histories) * self.inputs.tokens_per_request

    def store(self) -> None:
        self.pool.set_kv_buffer(self.layer, self.out_cache_loc, self.key, self.value)

    def page_table(self) -> torch.Tensor:
        """The table by plain loops."""
        page_size, context = self.pool.page_size, self.requests.max_context_len
        table = torch.zeros(self.inputs.batch_size, -(-context // page_size), dtype=torch.int32)
        for b, row in enumerate(self.inputs.req_pool_indices.tolist()):
            length = int(self.inputs.seq_lens[b]) + self.inputs.tokens_per_request
            for first in range(0, length, page_size):
                slot = int(self.requests.req_to_token[row, first])
                table[b, first // page_size] = slot // page_size
        return table

    def op_args(self) -> tuple[object, ...]:
        """Arguments of ``paged_attention``, this step's rows stored."""
        self.store()
        width = self.inputs.tokens_per_request
        keys, values = self.pool.get_key_buffer(self.layer), self.pool.get_value_buffer(self.layer)
        lengths, mask = self.inputs.seq_lens + width, self.inputs.custom_mask
        scale = self.pool.head_dim**-0.5
        return (self.query, keys, values, self.page_table(), lengths, mask, scale,
                self.pool.page_size, width)  # fmt: skip

    def expected(self) -> torch.Tensor:
        """The live rows' attention in float64, one query, head and key at a time."""
        width, heads = self.inputs.tokens_per_request, self.query.shape[1]
        out = torch.zeros(self.live_rows, heads, self.pool.head_dim, dtype=torch.float64)
        for b, (old_keys, old_values) in enumerate(self.histories):
            own = slice(b * width, (b + 1) * width)
            keys = torch.cat([old_keys, self.key[own]]).double()
            values = torch.cat([old_values, self.value[own]]).double()
            for i in range(width):
                sees = list(range(len(old_keys)))
                sees += [len(old_keys) + j for j in range(width) if self._sees(b, i, j)]
                for n in range(heads):
                    m = n * self.pool.head_num // heads
                    query = self.query[b * width + i, n].double()
                    scores = [float(query @ keys[s, m]) * self.pool.head_dim**-0.5 for s in sees]
                    weights = [math.exp(score - max(scores)) for score in scores]
                    for s, weight in zip(sees, weights, strict=True):
                        out[b * width + i, n] += weight / sum(weights) * values[s, m]
        return out

    def _sees(self, b: int, i: int, j: int) -> bool:
        mask = self.inputs.custom_mask
        return j <= i if mask is None else bool(mask[b, i, j])


def _tree(width: int) -> torch.Tensor:
    """A random tree: every node sees itself and its ancestors."""
    mask = torch.eye(width, dtype=torch.bool)
    for node in range(1, width):
        parent = int(torch.randint(node, ()))
        mask[node] |= mask[parent]
    return mask


def _build(
    lengths: list[int],
    *,
    width: int = 1,
    heads: int = 2,
    kv_heads: int = 2,
    head_dim: int = 16,
    page_size: int = 1,
    tree: bool = False,
    pads: int = 0,
    context: int | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Case:
    torch.manual_seed(seed)
    batch = len(lengths) + pads
    context = context or max(lengths, default=1) + width
    pages = [-(-(length + width) // page_size) for length in lengths]
    size = (sum(pages) + 2) * page_size
    pool = MHATokenToKVPool(size, page_size, dtype, kv_heads, head_dim, 2, "cpu")
    for tensor in pool.tensors().values():
        tensor.fill_(torch.nan)
    requests = ReqToTokenPool(batch + 1, context, "cpu")
    rows = requests.alloc(len(lengths) + 1)[1:][::-1]

    rows_TMD = (batch * width, kv_heads, head_dim)
    key, value = torch.randn(rows_TMD, dtype=dtype), torch.randn(rows_TMD, dtype=dtype)
    live = len(lengths) * width
    key[live:], value[live:] = torch.nan, torch.nan
    out_cache_loc = torch.zeros(batch * width, dtype=torch.int64)
    free = (torch.randperm(sum(pages) + 2) + 1).tolist()
    histories = []
    for b, (length, row) in enumerate(zip(lengths, rows, strict=True)):
        mine = torch.tensor([free.pop() for _ in range(pages[b])])
        slots = (mine[:, None] * page_size + torch.arange(page_size)).flatten()[: length + width]
        requests.req_to_token[row, : length + width] = slots.int()
        out_cache_loc[b * width : (b + 1) * width] = slots[length:]
        history = tuple(torch.randn(length, kv_heads, head_dim, dtype=dtype) for _ in "kv")
        pool.get_key_buffer(1)[slots[:length]] = history[0]
        pool.get_value_buffer(1)[slots[:length]] = history[1]
        histories.append(history)
    masks = [_tree(width) for _ in lengths] + [torch.zeros(width, width, dtype=torch.bool)] * pads
    inputs = SimpleNamespace(
        req_pool_indices=torch.tensor(rows + [0] * pads),
        seq_lens=torch.tensor(lengths + [1] * pads, dtype=torch.int32),
        batch_size=batch,
        num_tokens=batch * width,
        tokens_per_request=width,
        custom_mask=torch.stack(masks) if tree else None,
    )
    query = torch.randn(batch * width, heads, head_dim, dtype=dtype)
    return Case(requests, pool, inputs, query, key, value, out_cache_loc, histories)


@pytest.fixture
def make_case():
    """``make_case(lengths, width=..., ...)`` builds a :class:`Case`."""
    return _build


@pytest.fixture
def assert_attends():
    """``assert_attends(out, case)`` compares the live rows with the loops."""

    def check(out: torch.Tensor, case: Case, tolerance: float = 2e-5) -> None:
        assert out.shape == case.query.shape
        assert out.dtype == case.query.dtype
        live = out[: case.live_rows].double()
        torch.testing.assert_close(live, case.expected(), atol=tolerance, rtol=tolerance)

    return check
