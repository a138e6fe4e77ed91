"""Paged batches with NaN in all slots that no live row may read, and the result by plain loops."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from graphkit.kv import MHATokenToKVPool, ReqToTokenPool
from graphkit.spec import ForwardMode

EXTENDING = (ForwardMode.DRAFT_EXTEND, ForwardMode.DRAFT_EXTEND_V2)


@dataclass
class Case:
    """One batch of any mode; the live requests precede the pads.

    ``histories`` are the keys and values of each live request before its own rows, ``own_rows`` the
    numbers of those. Of an extending mode, ``seq_lens`` counts the own rows.
    """

    mode: ForwardMode
    requests: ReqToTokenPool
    pool: MHATokenToKVPool
    inputs: SimpleNamespace
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    out_cache_loc: torch.Tensor
    histories: list[tuple[torch.Tensor, torch.Tensor]]
    own_rows: list[int]
    layer: int = 1

    @property
    def live_rows(self) -> int:
        return sum(self.own_rows)

    @property
    def key_counts(self) -> torch.Tensor:
        """Keys of each request, pads included, int32."""
        appended = 0 if self.mode in EXTENDING else self.inputs.tokens_per_request
        return self.inputs.seq_lens + appended

    @property
    def row_sums(self) -> torch.Tensor:
        """Running sum of rows, pads included, int32."""
        rows = [self.inputs.tokens_per_request] * self.inputs.batch_size
        if self.mode is ForwardMode.DRAFT_EXTEND:
            rows = self.inputs.num_accepted_tokens.tolist()
        return torch.tensor([sum(rows[:b]) for b in range(len(rows) + 1)], dtype=torch.int32)

    def store(self) -> None:
        self.pool.set_kv_buffer(self.layer, self.out_cache_loc, self.key, self.value)

    def page_table(self) -> torch.Tensor:
        """The table by plain loops."""
        page_size, context = self.pool.page_size, self.requests.max_context_len
        table = torch.zeros(self.inputs.batch_size, -(-context // page_size), dtype=torch.int32)
        for b, row in enumerate(self.inputs.req_pool_indices.tolist()):
            for first in range(0, int(self.key_counts[b]), page_size):
                slot = int(self.requests.req_to_token[row, first])
                table[b, first // page_size] = slot // page_size
        return table

    def op_args(self) -> tuple[object, ...]:
        """Arguments of ``paged_attention``, this step's rows stored."""
        self.store()
        keys, values = self.pool.get_key_buffer(self.layer), self.pool.get_value_buffer(self.layer)
        return (self.query, keys, values, self.page_table(), self.key_counts, self.row_sums,
                self.inputs.custom_mask, self.pool.head_dim**-0.5, self.pool.page_size,
                self.inputs.tokens_per_request)  # fmt: skip

    def expected(self) -> torch.Tensor:
        """The live rows' attention in float64, one query, head and key at a time."""
        heads = self.query.shape[1]
        out = torch.zeros(self.live_rows, heads, self.pool.head_dim, dtype=torch.float64)
        for b, (old_keys, old_values) in enumerate(self.histories):
            first = sum(self.own_rows[:b])
            own = slice(first, first + self.own_rows[b])
            keys = torch.cat([old_keys, self.key[own]]).double()
            values = torch.cat([old_values, self.value[own]]).double()
            for i in range(self.own_rows[b]):
                sees = [s for s in range(len(keys)) if self._sees(b, i, s, len(keys))]
                for n in range(heads):
                    m = n * self.pool.head_num // heads
                    query = self.query[first + i, n].double()
                    scores = [float(query @ keys[s, m]) * self.pool.head_dim**-0.5 for s in sees]
                    weights = [math.exp(score - max(scores)) for score in scores]
                    for s, weight in zip(sees, weights, strict=True):
                        out[first + i, n] += weight / sum(weights) * values[s, m]
        return out

    def _sees(self, b: int, i: int, key: int, keys: int) -> bool:
        mask = self.inputs.custom_mask
        if mask is None:
            return key <= keys - self.own_rows[b] + i
        column = key - (keys - mask.shape[2])
        return column < 0 or bool(mask[b, i, column])


def _tree(width: int, columns: int) -> torch.Tensor:
    """A random tree: every node sees itself and its ancestors, and some of the keys before."""
    before = torch.rand(width, columns - width) < 0.5
    mask = torch.eye(width, dtype=torch.bool)
    for node in range(1, width):
        parent = int(torch.randint(node, ()))
        mask[node] |= mask[parent]
    return torch.cat([before, mask], 1)


def _build(
    lengths: list[int],
    *,
    mode: ForwardMode = ForwardMode.TARGET_VERIFY,
    rows: list[int] | None = None,
    width: int = 1,
    columns: int | None = None,
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
    own_rows = rows or [width] * len(lengths)
    context = context or max(lengths, default=1) + width
    pages = [-(-(length + n) // page_size) for length, n in zip(lengths, own_rows, strict=True)]
    size = (sum(pages) + 2) * page_size
    pool = MHATokenToKVPool(size, page_size, dtype, kv_heads, head_dim, 2, "cpu")
    for tensor in pool.tensors().values():
        tensor.fill_(torch.nan)
    requests = ReqToTokenPool(batch + 1, context, "cpu")
    pool_rows = requests.alloc(len(lengths) + 1)[1:][::-1]

    rows_TMD = (batch * width, kv_heads, head_dim)
    key, value = torch.randn(rows_TMD, dtype=dtype), torch.randn(rows_TMD, dtype=dtype)
    live = sum(own_rows)
    key[live:], value[live:] = torch.nan, torch.nan
    out_cache_loc = torch.zeros(batch * width, dtype=torch.int64)
    free = (torch.randperm(sum(pages) + 2) + 1).tolist()
    histories = []
    for b, (length, row) in enumerate(zip(lengths, pool_rows, strict=True)):
        first, keys = sum(own_rows[:b]), length + own_rows[b]
        mine = torch.tensor([free.pop() for _ in range(pages[b])])
        slots = (mine[:, None] * page_size + torch.arange(page_size)).flatten()[:keys]
        requests.req_to_token[row, :keys] = slots.int()
        out_cache_loc[first : first + own_rows[b]] = slots[length:]
        history = tuple(torch.randn(length, kv_heads, head_dim, dtype=dtype) for _ in "kv")
        pool.get_key_buffer(1)[slots[:length]] = history[0]
        pool.get_value_buffer(1)[slots[:length]] = history[1]
        histories.append(history)
    columns = columns or width
    masks = [_tree(width, columns) for _ in lengths]
    masks += [torch.zeros(width, columns, dtype=torch.bool)] * pads
    counted = own_rows if mode in EXTENDING else [0] * len(lengths)
    seq_lens = [length + n for length, n in zip(lengths, counted, strict=True)] + [1] * pads
    inputs = SimpleNamespace(
        req_pool_indices=torch.tensor(pool_rows + [0] * pads),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        num_accepted_tokens=torch.tensor(own_rows + [1] * pads, dtype=torch.int32),
        batch_size=batch,
        num_tokens=batch * width,
        tokens_per_request=width,
        custom_mask=torch.stack(masks) if tree else None,
    )
    query = torch.randn(batch * width, heads, head_dim, dtype=dtype)
    return Case(mode, requests, pool, inputs, query, key, value, out_cache_loc, histories, own_rows)


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
