"""Requests whose prefixes are prefilled into the KV pools of a target and its draft models.

The state is that between two steps of an engine. The first tokens of each request are committed.
The next token, the bonus token, is known but not in any KV pool. Draft models run one token ahead:
the row of position p takes token p + 1 and the target's hidden state of position p.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from graphkit.engine.attention import PagedAttention
from graphkit.engine.kv import MHATokenToKVPool, ReqToTokenPool
from graphkit.errors import ConfigError
from graphkit.models.byte_tokenizer import encode
from graphkit.models.heads.dflash import DFlashHead
from graphkit.models.heads.eagle import EagleHead
from graphkit.models.heads.eagle3 import Eagle3Head
from graphkit.models.heads.layers import Attend, causal_attend
from graphkit.models.heads.mtp_chain import MTPHead
from graphkit.models.heads.sources import AuxStates
from graphkit.models.sharded.model import LlamaModel
from graphkit.ops.logits import top_candidates
from graphkit.spec import SpecConfig

CONTEXT = 128
"""Longest context of a request in tokens, drafts included."""

_SHORTEST_PREFIX = 8


class PrefilledRequests:
    """Requests with their texts, rows and KV slots, and the models' state after their prefixes.

    Args:
        count: Number of requests.
        spec: Determines how many tokens a step writes ahead.
        req_to_token_pool: Receives the slots; must be empty.

    Attributes:
        texts: int64 [count, CONTEXT + S + 1], token ids. Longer than the context, because draft
            models read ahead.
        lengths: int64 [count], committed tokens.
        rows: int64 [count], request rows.
        slots: int64 [pool rows, CONTEXT], KV slot of each position of each row; 0 in unused rows.
        features: [count, CONTEXT, D], the target's hidden states, set by ``prefill_target``.
        topk_p, topk_index: [count, K], candidates after each bonus token, set by
            ``prefill_eagle``.
        hidden_states: [count, H], the head's hidden states that the candidates come from, set by
            ``prefill_eagle``. Like ``features`` on the device; all others are numpy arrays.

    Raises:
        ConfigError: A step writes more tokens ahead than a request has room for.
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
        slots = 1 + np.arange(count * CONTEXT).reshape(count, CONTEXT)
        table = req_to_token_pool.req_to_token
        table[self.on_device(self.rows)] = self.on_device(slots).to(table.dtype)
        self.slots = np.zeros((len(table), CONTEXT), dtype=np.int64)
        self.slots[self.rows] = slots
        is_prefix = np.arange(CONTEXT) < self.lengths[:, None]
        self._prefix = self.on_device(is_prefix.ravel().nonzero()[0])
        self._prefix_slots = self.on_device(slots[is_prefix])
        self._positions = torch.arange(CONTEXT, device=self.device).repeat(count)

    def on_device(self, numbers: NDArray[np.integer[Any]]) -> torch.Tensor:
        """Copy an array to the device as a tensor."""
        return torch.from_numpy(numbers).to(self.device)

    @torch.no_grad()
    def prefill_target(
        self, model: LlamaModel, attention: PagedAttention, aux_layers: Sequence[int] = ()
    ) -> None:
        """Prefill all prefixes with the target and keep the hidden states that heads read."""
        aux, attend = AuxStates(aux_layers), self._storing_attend(attention)
        hidden = model(self._shifted_tokens(0), self._positions, attend, aux=aux)
        features = aux.joined() if aux_layers else hidden
        self.features = features.view(self.count, CONTEXT, -1)

    @torch.no_grad()
    def prefill_eagle(self, head: EagleHead | Eagle3Head, attention: PagedAttention) -> None:
        """Prefill all prefixes with the head and keep its candidates after each prefix."""
        features = self.features.flatten(0, 1)
        hidden = head(
            self._shifted_tokens(1), features, self._positions, self._storing_attend(attention)
        )
        last = self.on_device(np.arange(self.count) * CONTEXT + self.lengths - 1)
        self.hidden_states = hidden[last]
        topk_p, topk_index = top_candidates(
            head.logits(self.hidden_states),
            self.spec.topk,
            token_map=head.token_map() if isinstance(head, Eagle3Head) else None,
        )
        self.topk_p, self.topk_index = topk_p.cpu().numpy(), topk_index.cpu().numpy()

    @torch.no_grad()
    def prefill_dflash(self, head: DFlashHead, attention: PagedAttention) -> None:
        """Store the keys and values of all prefixes that the head's blocks attend to."""
        features = self.features.flatten(0, 1)[self._prefix]
        context = head.encoder(features)
        heads = head.context_heads(context, self._positions[self._prefix])
        for layer, (key, value) in enumerate(heads):
            attention.store(layer, key, value, self._prefix_slots)

    @torch.no_grad()
    def prefill_mtp(self, head: MTPHead, attention: PagedAttention) -> None:
        """Prefill all prefixes with each layer, shifted by one more token per layer."""
        hidden, attend = self.features.flatten(0, 1), self._storing_attend(attention)
        for layer in range(min(self.spec.num_steps, len(head.layers))):
            hidden = head(layer, self._shifted_tokens(1 + layer), hidden, self._positions, attend)

    def _shifted_tokens(self, shift: int) -> torch.Tensor:
        """Return token p + ``shift`` for the row of each position p, flat."""
        return self.on_device(self.texts[:, shift : shift + CONTEXT]).flatten()

    def _storing_attend(self, attention: PagedAttention) -> Attend:
        """Return an ``attend`` over whole texts that stores keys and values of prefixes only."""
        causal, pool = causal_attend(self.count, CONTEXT), attention.kv_pool
        assert isinstance(pool, MHATokenToKVPool), "the reference models have keys and values"

        def attend(
            layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
        ) -> torch.Tensor:
            stored = key[self._prefix], value[self._prefix]
            pool.set_kv_buffer(layer, self._prefix_slots, *stored)
            return causal(layer, query, key, value)

        return attend


def _prefix_lengths(count: int, spec: SpecConfig) -> NDArray[np.int64]:
    ahead = max(spec.num_draft_tokens, spec.topk * spec.num_steps)
    room = CONTEXT - ahead - _SHORTEST_PREFIX
    if room < 1:
        raise ConfigError(
            f"topk {spec.topk} with num_steps {spec.num_steps} writes {ahead} tokens ahead, but "
            f"the sample requests have room for {CONTEXT - _SHORTEST_PREFIX - 1}. Use a smaller "
            "topk.",
            field="topk",
        )
    return _SHORTEST_PREFIX + np.arange(count) * 29 % room


def _texts(count: int, length: int) -> NDArray[np.int64]:
    text = np.array(encode(inspect.getsource(textwrap)))
    starts = np.arange(count) * 37 % (len(text) - length)
    texts: NDArray[np.int64] = text[starts[:, None] + np.arange(length)]
    return texts
