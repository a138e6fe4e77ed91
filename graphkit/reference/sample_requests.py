"""Requests in the middle of a text, as a draft model and its target leave them between two steps.

Of each request the first tokens are committed. The next one, its root, is known too, as the
target's own; no KV pool holds it yet. Draft models run one token ahead: the row of position p holds
token p + 1, beside the target's hidden state of p.
"""

from __future__ import annotations

import inspect
import textwrap
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from graphkit.attention import PagedAttention
from graphkit.errors import ConfigError
from graphkit.kv import ReqToTokenPool
from graphkit.reference.eagle import EagleHead
from graphkit.reference.layers import Attend
from graphkit.reference.model import LlamaModel, causal_attend
from graphkit.reference.mtp import MTPHead
from graphkit.reference.tokenizer import encode
from graphkit.spec import SpecConfig
from graphkit.spec.tree import top_candidates

CONTEXT = 128
"""Most tokens of a request, drafts included."""

_SHORTEST_PREFIX = 8


class SampleRequests:
    """Requests with their slots, and what each model knows of their prefixes.

    Args:
        count: How many.
        spec: How far a step may write ahead.
        req_to_token_pool: Where their slots are entered; nothing else may be in it.

    Attributes:
        texts: int64 [count, CONTEXT + S + 1], more than any row reads.
        lengths: int64 [count], committed tokens.
        rows: int64 [count], rows of the request pool.
        slots: int64 [count, CONTEXT].
        features: The target's hidden states [count, CONTEXT, H]; once ``read_by_target`` ran.
        topk_p, topk_index: [count, K], the first candidates after each root; once ``read_by_eagle``
            ran.
        hidden_states: [count, H], the head's that made them; on the device, as ``features`` are.

    Raises:
        ConfigError: A step writes too far ahead.
    """

    features: torch.Tensor
    topk_p: NDArray[np.float32]
    topk_index: NDArray[np.int64]
    hidden_states: torch.Tensor

    def __init__(self, count: int, spec: SpecConfig, req_to_token_pool: ReqToTokenPool) -> None:
        self.count, self.spec, self.device = count, spec, req_to_token_pool.device
        self.lengths = _prefix_lengths(count, spec)
        self.texts = _texts(count, CONTEXT + spec.num_steps + 1)
        self.rows = np.array(req_to_token_pool.alloc(count))
        self.slots = 1 + np.arange(count * CONTEXT).reshape(count, CONTEXT)
        table = req_to_token_pool.req_to_token
        table[self.on_device(self.rows)] = self.on_device(self.slots).to(table.dtype)
        is_prefix = np.arange(CONTEXT) < self.lengths[:, None]
        self._prefix = self.on_device(is_prefix.ravel().nonzero()[0])
        self._prefix_slots = self.on_device(self.slots[is_prefix])
        self._positions = torch.arange(CONTEXT, device=self.device).repeat(count)

    def on_device(self, numbers: NDArray[np.integer[Any]]) -> torch.Tensor:
        """An index for device tensors."""
        return torch.from_numpy(numbers).to(self.device)

    @torch.no_grad()
    def read_by_target(self, model: LlamaModel, attention: PagedAttention) -> None:
        """Read all prefixes into the target's KV pool."""
        hidden = model(self._ahead(0), self._positions, self._keeping(attention))
        self.features = hidden.view(self.count, CONTEXT, -1)

    @torch.no_grad()
    def read_by_eagle(self, head: EagleHead, attention: PagedAttention) -> None:
        """Read them into the head's, and keep what it predicts from each request's last row."""
        features = self.features.flatten(0, 1)
        hidden = head(self._ahead(1), features, self._positions, self._keeping(attention))
        last = self.on_device(np.arange(self.count) * CONTEXT + self.lengths - 1)
        self.hidden_states = hidden[last]
        topk_p, topk_index = top_candidates(head.logits(self.hidden_states), self.spec.topk)
        self.topk_p, self.topk_index = topk_p.cpu().numpy(), topk_index.cpu().numpy()

    @torch.no_grad()
    def read_by_mtp(self, head: MTPHead, attention: PagedAttention) -> None:
        """Read them into the layers', each one token further ahead than the one before."""
        hidden, attend = self.features.flatten(0, 1), self._keeping(attention)
        for layer in range(min(self.spec.num_steps, len(head.layers))):
            hidden = head(layer, self._ahead(1 + layer), hidden, self._positions, attend)

    def _ahead(self, tokens: int) -> torch.Tensor:
        """The token so far ahead of each row, flat."""
        return self.on_device(self.texts[:, tokens : tokens + CONTEXT]).flatten()

    def _keeping(self, attention: PagedAttention) -> Attend:
        """Attend over whole texts; what lies behind the prefixes is not kept."""
        causal = causal_attend(self.count, CONTEXT)

        def attend(
            layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
        ) -> torch.Tensor:
            kept = key[self._prefix], value[self._prefix]
            attention.kv_pool.set_kv_buffer(layer, self._prefix_slots, *kept)
            return causal(layer, query, key, value)

        return attend


def _prefix_lengths(count: int, spec: SpecConfig) -> NDArray[np.int64]:
    ahead = max(spec.num_draft_tokens, spec.topk * spec.num_steps)
    room = CONTEXT - ahead - _SHORTEST_PREFIX
    if room < 1:
        raise ConfigError(
            f"topk is {spec.topk}: {spec.num_steps} steps of it write {ahead} tokens ahead, but "
            f"the sample requests have {CONTEXT}. Make it smaller.",
            field="topk",
        )
    return _SHORTEST_PREFIX + np.arange(count) * 29 % room


def _texts(count: int, length: int) -> NDArray[np.int64]:
    text = np.array(encode(inspect.getsource(textwrap)))
    starts = np.arange(count) * 37 % (len(text) - length)
    texts: NDArray[np.int64] = text[starts[:, None] + np.arange(length)]
    return texts
