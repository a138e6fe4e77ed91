"""Random paged batches for attention backends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from graphkit.audit.kit.attention_batch import AttentionBatch, BatchInputs
from graphkit.buffers.attention import EXTENDING
from graphkit.engine.kv import MHATokenToKVPool, MLATokenToKVPool, ReqToTokenPool
from graphkit.spec import ForwardMode


def attention_batch(
    lengths: Sequence[int],
    *,
    mode: ForwardMode = ForwardMode.TARGET_VERIFY,
    rows: Sequence[int] | None = None,
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
    chunked: bool = False,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> AttentionBatch:
    """Create a batch of random numbers.

    Every slot that no live row may read holds NaN, and so do the rows of pads.

    Args:
        lengths: Keys of each live request before its own rows.
        mode: Mode of the batch.
        rows: Rows of each live request; ``width`` by default.
        width: Most rows of a request (W).
        columns: Columns of the mask (C); W by default.
        heads: Query heads.
        kv_heads: Key-value heads; 1 with latents.
        head_dim: Elements of a key.
        page_size: Slots per page.
        tree: Whether a mask says what each row sees.
        pads: Pad requests behind the live ones.
        context: Tokens that the request pool holds per request; as many as needed by default.
        dtype: Dtype of queries, keys and values.
        latent: Elements of a key that are its value; 0 for a pool of keys and values.
        window: Option of ``attend``, like the next.
        softcap: Bound of the scores.
        sinks: Whether heads have sinks.
        chunked: Option of ``attend``.
        device: Device of pools and tensors.
        seed: Seed of all numbers.
    """
    random = torch.Generator().manual_seed(seed)
    batch, own_rows = len(lengths) + pads, list(rows or [width] * len(lengths))
    context = context or max(lengths, default=1) + width
    pages = [-(-(length + n) // page_size) for length, n in zip(lengths, own_rows, strict=True)]
    common = ((sum(pages) + 2) * page_size, page_size, dtype)
    pool: MHATokenToKVPool | MLATokenToKVPool
    if latent:
        kv_heads = 1
        pool = MLATokenToKVPool(*common, latent, head_dim - latent, 2, device)
    else:
        pool = MHATokenToKVPool(*common, kv_heads, head_dim, 2, device)
    for tensor in pool.tensors().values():
        tensor.fill_(torch.nan)
    requests = ReqToTokenPool(batch + 1, context, device)
    pool_rows = requests.alloc(len(lengths) + 1)[1:][::-1]

    def randn(count: int) -> tuple[Tensor, Tensor]:
        """Return keys and values."""
        shape = (count, kv_heads, head_dim)
        key, value = (torch.randn(shape, generator=random).to(dtype) for _ in "kv")
        return key, key[..., :latent] if latent else value

    key, value = randn(batch * width)
    live = sum(own_rows)
    key[live:], value[live:] = torch.nan, torch.nan
    out_cache_loc = torch.zeros(batch * width, dtype=torch.int64)
    free = (torch.randperm(sum(pages) + 2, generator=random) + 1).tolist()
    histories = []
    for b, (length, row) in enumerate(zip(lengths, pool_rows, strict=True)):
        first, keys = sum(own_rows[:b]), length + own_rows[b]
        mine = torch.tensor([free.pop() for _ in range(pages[b])], dtype=torch.int64)
        slots = (mine[:, None] * page_size + torch.arange(page_size)).flatten()[:keys]
        requests.req_to_token[row, :keys] = slots.int().to(device)
        out_cache_loc[first : first + own_rows[b]] = slots[length:]
        history = randn(length)
        pool.get_key_buffer(1)[slots[:length]] = history[0].to(device)
        pool.get_value_buffer(1)[slots[:length]] = history[1].to(device)
        histories.append(history)
    columns = columns or width
    masks = [_tree(width, columns, random) for _ in lengths]
    masks += [torch.zeros(width, columns, dtype=torch.bool)] * pads
    counted = own_rows if mode in EXTENDING else [0] * len(lengths)
    seq_lens = [length + n for length, n in zip(lengths, counted, strict=True)] + [1] * pads
    options: dict[str, Any] = {"window": window} if window else {}
    options |= {"softcap": softcap} if softcap else {}
    options |= {"chunked": True} if chunked else {}
    options |= {"sinks_N": torch.randn(heads, generator=random).to(device)} if sinks else {}
    key = key.to(device)
    return AttentionBatch(
        mode=mode,
        requests=requests,
        pool=pool,
        inputs=BatchInputs(
            req_pool_indices=torch.tensor(pool_rows + [0] * pads, device=device),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
            num_accepted_tokens=torch.tensor(own_rows + [1] * pads, device=device).int(),
            batch_size=batch,
            num_tokens=batch * width,
            tokens_per_request=width,
            custom_mask=torch.stack(masks).to(device) if tree else None,
        ),
        query=torch.randn(batch * width, heads, head_dim, generator=random).to(device, dtype),
        key=key,
        value=key[..., :latent] if latent else value.to(device),
        out_cache_loc=out_cache_loc.to(device),
        histories=histories,
        own_rows=own_rows,
        options=options,
    )


def _tree(width: int, columns: int, random: torch.Generator) -> Tensor:
    """Return a random tree: a node sees itself, its ancestors, and some of the keys before."""
    before = torch.rand(width, columns - width, generator=random) < 0.5
    mask = torch.eye(width, dtype=torch.bool)
    for node in range(1, width):
        mask[node] |= mask[int(torch.randint(node, (), generator=random))]
    return torch.cat([before, mask], 1)
