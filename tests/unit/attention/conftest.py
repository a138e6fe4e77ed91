"""Paged batches with NaN in all slots that no live row may read, and the result by plain loops."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from graphkit.kv import MHATokenToKVPool, MLATokenToKVPool, ReqToTokenPool
from graphkit.spec import ForwardMode

EXTENDING = (ForwardMode.DRAFT_EXTEND, ForwardMode.DRAFT_EXTEND_V2)


@dataclass
class Case:
    """One batch of any mode; the live requests precede the pads.

    ``histories`` are the keys and values of each live request before its own rows, ``own_rows`` the
    numbers of those. Of an extending mode, ``seq_lens`` counts the own rows. A pool of latents has
    keys that begin with their values. ``options`` are those of ``attend``.
    """

    mode: ForwardMode
    requests: ReqToTokenPool
    pool: MHATokenToKVPool | MLATokenToKVPool
    inputs: SimpleNamespace
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    out_cache_loc: torch.Tensor
    histories: list[tuple[torch.Tensor, torch.Tensor]]
    own_rows: list[int]
    options: dict[str, object]
    layer: int = 1

    @property
    def scale(self) -> float:
        return self.key.shape[2] ** -0.5

    @property
    def stored(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What ``attend`` takes as keys and values."""
        if isinstance(self.pool, MLATokenToKVPool):
            return self.value, self.key[..., self.value.shape[2] :]
        return self.key, self.value

    def attend(self, backend_type):
        backend = backend_type(self.requests, self.pool, scale=self.scale)
        metadata = backend.metadata(self.mode, self.inputs)
        rows = (self.query, *self.stored, self.out_cache_loc)
        return backend.attend(self.layer, *rows, metadata, **self.options)

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
        is_latent = isinstance(self.pool, MLATokenToKVPool)
        store = self.pool.set_mla_kv_buffer if is_latent else self.pool.set_kv_buffer
        store(self.layer, self.out_cache_loc, *self.stored)

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
                self.inputs.custom_mask, self.scale, self.pool.page_size,
                self.inputs.tokens_per_request, *self.options.values())  # fmt: skip

    def expected(self) -> torch.Tensor:
        """The live rows' attention in float64, one query, head and key at a time."""
        heads, kv_heads, value_dim = self.query.shape[1], *self.value.shape[1:]
        out = torch.zeros(self.live_rows, heads, value_dim, dtype=torch.float64)
        for b, (old_keys, old_values) in enumerate(self.histories):
            first = sum(self.own_rows[:b])
            own = slice(first, first + self.own_rows[b])
            keys = torch.cat([old_keys, self.key[own]]).double()
            values = torch.cat([old_values, self.value[own]]).double()
            for i in range(self.own_rows[b]):
                sees = [s for s in range(len(keys)) if self._sees(b, i, s, len(keys))]
                sees = sees[-self.options["window"] :]
                for n in range(heads):
                    m = n * kv_heads // heads
                    query = self.query[first + i, n].double()
                    scores = [self._score(float(query @ keys[s, m])) for s in sees]
                    sinks = self.options["sinks_N"]
                    others = [] if sinks is None else [float(sinks[n])]
                    top = max(scores + others)
                    weights = [math.exp(score - top) for score in scores]
                    total = sum(weights) + sum(math.exp(other - top) for other in others)
                    for s, weight in zip(sees, weights, strict=True):
                        out[first + i, n] += weight / total * values[s, m]
        return out

    def _score(self, product: float) -> float:
        score, cap = product * self.scale, self.options["softcap"]
        return cap * math.tanh(score / cap) if cap else score

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
    latent: int = 0,
    window: int = 0,
    softcap: float = 0.0,
    sinks: bool = False,
    seed: int = 0,
) -> Case:
    torch.manual_seed(seed)
    batch = len(lengths) + pads
    own_rows = rows or [width] * len(lengths)
    context = context or max(lengths, default=1) + width
    pages = [-(-(length + n) // page_size) for length, n in zip(lengths, own_rows, strict=True)]
    size = (sum(pages) + 2) * page_size
    if latent:
        kv_heads, rotated = 1, head_dim - latent
        pool = MLATokenToKVPool(size, page_size, dtype, latent, rotated, 2, "cpu")
    else:
        pool = MHATokenToKVPool(size, page_size, dtype, kv_heads, head_dim, 2, "cpu")
    for tensor in pool.tensors().values():
        tensor.fill_(torch.nan)
    requests = ReqToTokenPool(batch + 1, context, "cpu")
    pool_rows = requests.alloc(len(lengths) + 1)[1:][::-1]

    rows_TMD = (batch * width, kv_heads, head_dim)
    key, value = torch.randn(rows_TMD, dtype=dtype), torch.randn(rows_TMD, dtype=dtype)
    live = sum(own_rows)
    key[live:], value[live:] = torch.nan, torch.nan
    value = key[..., :latent] if latent else value
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
        history = (history[0], history[0][..., :latent] if latent else history[1])
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
    options = {
        "window": window, "softcap": softcap, "sinks_N": torch.randn(heads) if sinks else None
    }  # fmt: skip
    return Case(
        mode, requests, pool, inputs, query, key, value, out_cache_loc, histories, own_rows, options
    )


@pytest.fixture
def make_case():
    """``make_case(lengths, width=..., ...)`` builds a :class:`Case`."""
    return _build


@pytest.fixture
def assert_attends():
    """``assert_attends(out, case)`` compares the live rows with the loops."""

    def check(out: torch.Tensor, case: Case, tolerance: float = 2e-5) -> None:
        assert out.shape == (*case.query.shape[:2], case.value.shape[2])
        assert out.dtype == case.query.dtype
        live = out[: case.live_rows].double()
        torch.testing.assert_close(live, case.expected(), atol=tolerance, rtol=tolerance)

    return check
