"""An attention backend, a KV pool and a table of slots that derive from no class of graphkit."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from graphkit.buffers import AttentionBackend
from graphkit.spec import ForwardMode


class StackedPool:
    """Keys and values of all layers in one buffer, [slots, layers, 2, heads, head_dim]."""

    def __init__(self, size, page_size, layers, heads, head_dim, device):
        self.size, self.page_size = size, page_size
        slots = (1 + -(-size // page_size)) * page_size
        self._memory = {"kv": torch.zeros(slots, layers, 2, heads, head_dim, device=device)}

    @property
    def kv(self):
        return self._memory["kv"]

    def tensors(self):
        return dict(self._memory)

    def move_kv_cache(self, tgt_loc, src_loc):
        self.kv.index_copy_(0, tgt_loc.flatten(), self.kv.index_select(0, src_loc.flatten()))


class BlockTable:
    """A table of slots, and a stack of its free rows."""

    def __init__(self, size, max_context_len, device):
        self.size, self.max_context_len, self.device = size, max_context_len, torch.device(device)
        shape = size + 1, max_context_len
        self.req_to_token = torch.zeros(shape, dtype=torch.int64, device=device)
        self._rows = list(range(1, size + 1))

    @property
    def available(self):
        return len(self._rows)

    def alloc(self, n):
        rows, self._rows = self._rows[:n], self._rows[n:]
        return rows

    def free(self, rows):
        self._rows += rows


@dataclass
class Visible:
    """Metadata of this backend: slots of each row's keys, and which of them it sees."""

    slots: torch.Tensor
    visible: torch.Tensor


class GatherAttention(AttentionBackend):
    """Gathers all keys of a request, and masks those that a row does not see."""

    def __init__(self, table, pool, scale=None):
        self.req_to_token_pool, self.kv_pool, self.scale = table, pool, scale

    def supports(self, mode):
        return True

    def init_state(self, sizes, max_tokens):
        self.context_len = sizes.max_context_len

    def metadata(self, mode, inputs):
        rows, requests = inputs.num_tokens, inputs.batch_size
        device = inputs.seq_lens.device
        if mode is ForwardMode.DRAFT_EXTEND:  # packed
            counts = inputs.num_accepted_tokens
            ends = counts.cumsum(0)
            owner = torch.searchsorted(ends, torch.arange(rows, device=device), right=True)
            owner = owner.clamp(max=requests - 1)
            first = inputs.seq_lens - counts - (ends - counts)
        else:
            width = rows // max(requests, 1)
            owner = torch.arange(rows, device=device) // width
            extends = mode is ForwardMode.DRAFT_EXTEND_V2
            first = (
                inputs.seq_lens - extends * width - torch.arange(requests, device=device) * width
            )
        last = first[owner] + torch.arange(rows, device=device)
        column = torch.arange(self.context_len, device=device)
        visible = column <= last[:, None]
        mask = getattr(inputs, "custom_mask", None)
        if mask is not None:
            columns, width = mask.shape[2], mask.shape[1]
            start = (inputs.seq_lens + width - columns)[owner, None]
            own = mask.flatten(0, 1).gather(1, (column - start).clamp(0, columns - 1))
            visible = torch.where(column < start, True, own & (column < start + columns))
        slots = self.req_to_token_pool.req_to_token[inputs.req_pool_indices[owner]]
        return Visible(slots[:, : self.context_len], visible)

    def attend(self, layer, query, key, value, out_cache_loc, metadata, *, window=0):
        assert not window, "no layer has a window"
        kv = self.kv_pool.kv
        kv[out_cache_loc, layer] = torch.stack([key, value], 1).to(kv.dtype)
        keys, values = kv[metadata.slots.long(), layer].unbind(2)
        group = query.shape[1] // keys.shape[2]
        keys, values = (each.repeat_interleave(group, 2) for each in (keys, values))
        scale = self.scale or query.shape[2] ** -0.5
        scores = torch.einsum("thd,tlhd->thl", query, keys) * scale
        scores = scores.masked_fill(~metadata.visible[:, None], -torch.inf)
        values = values.masked_fill(~metadata.visible[:, :, None, None], 0)  # may be NaN
        return torch.einsum("thl,tlhd->thd", scores.softmax(-1), values)
