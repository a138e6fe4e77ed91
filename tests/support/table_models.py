"""A target whose logits after a token depend on the token alone, and a drafter that knows them."""

from __future__ import annotations

import torch

from graphkit.attention import SdpaAttention, TritonAttention
from graphkit.config import BufferSizes
from graphkit.engine import Drafter, EngineModel, SpeculativeEngine
from graphkit.kv import MHATokenToKVPool, ReqToTokenPool
from graphkit.runners import ForwardOutput
from graphkit.spec import SpecConfig
from graphkit.step.chain_tree import ChainTree

STEPS = 3


class TopDrafter(Drafter):
    """Proposes K chains: the most probable tokens, and behind each the most probable text."""

    max_path = STEPS + 1

    def __init__(self, logits):
        self._logits = logits

    def prepare(self, context):
        self._topk, width = context.spec.topk, context.verify_width
        self._tree = ChainTree(self._topk, width, context.sizes.max_batch_size, context.device)

    def prefill(self, chunk):
        pass

    def draft(self, req_pool_indices, seq_lens, bonus_tokens):
        tokens = [bonus_tokens[:, None], self._logits[bonus_tokens].topk(self._topk).indices]
        for _ in range(STEPS - 1):
            tokens.append(self._logits[tokens[-1]].argmax(-1))
        return self._tree.of(torch.cat(tokens, 1))

    def extend(self, verified):
        pass

    def extend_accepted(self, verified, num_accepted_tokens):
        pass


def table_engine(logits, topk, *, context_len=160, max_batch_size=8, **options):
    """An engine over the table [V, V], captured at its largest size."""
    device = logits.device.type
    requests = ReqToTokenPool(max_batch_size, context_len, device)
    pool = MHATokenToKVPool(max_batch_size * context_len, 1, torch.float32, 1, 16, 1, device)
    engine = SpeculativeEngine(
        EngineModel(
            lambda inputs: ForwardOutput(next_token_logits=logits[inputs.input_ids]),
            (TritonAttention if device == "cuda" else SdpaAttention)(requests, pool),
        ),
        TopDrafter(logits),
        spec=SpecConfig("EAGLE", STEPS, topk, 1 + STEPS * topk),
        sizes=BufferSizes(max_batch_size, context_len, 8, len(logits), torch.float32),
        batch_sizes=[max_batch_size],
        device=device,
        **options,
    )
    engine.capture()
    return engine
