"""Targets whose logits are a table, drafters without state, and the filters of sampling by hand."""

from __future__ import annotations

import torch

from graphkit.config import BufferSizes
from graphkit.engine import Drafter, EngineModel, SpeculativeEngine
from graphkit.engine.attention import SdpaAttention, TritonAttention
from graphkit.engine.kv import MHATokenToKVPool, ReqToTokenPool
from graphkit.engine.step.draft_tree import ChainTree
from graphkit.runners import ForwardOutput
from graphkit.spec import SpecConfig

STEPS = 3


class StatelessDrafter(Drafter):
    """A drafter whose drafts depend on the last token and the state of the step alone."""

    def prefill(self, chunk):
        pass

    def extend(self, verified):
        pass


class TopDrafter(StatelessDrafter):
    """Proposes K chains: the most probable tokens, and behind each the most probable text."""

    max_path = STEPS + 1

    def __init__(self, logits):
        self._logits = logits

    def prepare(self, context):
        self._topk, width = context.spec.topk, context.verify_width
        self._tree = ChainTree(self._topk, width, context.sizes.max_batch_size, context.device)

    def draft(self, req_pool_indices, seq_lens, bonus_tokens):
        tokens = [bonus_tokens[:, None], self._logits[bonus_tokens].topk(self._topk).indices]
        for _ in range(STEPS - 1):
            tokens.append(self._logits[tokens[-1]].argmax(-1))
        return self._tree.of(torch.cat(tokens, 1))


def table_model(logits_of, device, batch_size, context_len, *, page_size=1):
    """A target with the logits ``logits_of(inputs)``, over a pool with room for a batch."""
    requests = ReqToTokenPool(batch_size, context_len, device)
    pool = MHATokenToKVPool(batch_size * context_len, page_size, torch.float32, 1, 16, 1, device)
    kind = TritonAttention if str(device) == "cuda" else SdpaAttention
    return EngineModel(
        lambda inputs: ForwardOutput(next_token_logits=logits_of(inputs)), kind(requests, pool)
    )


def table_engine(logits, topk, drafter=None, *, context_len=160, max_batch_size=8, **options):
    """An engine over logits after each token, [V, V], captured at its largest size."""
    device = logits.device.type
    engine = SpeculativeEngine(
        table_model(lambda inputs: logits[inputs.input_ids], device, max_batch_size, context_len),
        TopDrafter(logits) if drafter is None else drafter,
        spec=SpecConfig("EAGLE", STEPS, topk, 1 + STEPS * topk),
        sizes=BufferSizes(max_batch_size, context_len, 8, len(logits), torch.float32),
        batch_sizes=[max_batch_size],
        device=device,
        **options,
    )
    engine.capture()
    return engine


def filtered(logits, *, temperature, top_k=0, top_p=1.0, min_p=0.0):
    """The distribution of one row, in float64, by sorting."""
    probs = (logits.double() / temperature).softmax(0)
    order = probs.argsort(descending=True)
    kept = order[:top_k] if top_k else order
    share = probs[kept] / probs[kept].sum()
    kept = kept[share.cumsum(0) - share < top_p]
    kept = kept[probs[kept] >= min_p * probs.max()]
    result = torch.zeros_like(probs)
    result[kept] = probs[kept] / probs[kept].sum()
    return result
