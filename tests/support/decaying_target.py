"""A target with recurrent state alone, and engines over it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from graphkit.config import BufferSizes
from graphkit.engine import EngineModel, SpeculativeEngine
from graphkit.engine.attention import SdpaAttention
from graphkit.engine.kv import MHATokenToKVPool, RecurrentStatePool, ReqToTokenPool
from graphkit.runners import ForwardOutput
from graphkit.spec import SpecConfig

VOCAB, HIDDEN, REQUESTS, CONTEXT, STEPS = 128, 16, 4, 80, 3


class DecayingForward:
    """A target with one decaying sum per request: state = 0.7 * state + embedding."""

    def __init__(self, device: str, width: int) -> None:
        generator = torch.Generator().manual_seed(2)
        self.embedding = torch.randn(VOCAB, HIDDEN, generator=generator).to(device)
        self.head = torch.randn(HIDDEN, VOCAB, generator=generator).to(device)
        self.states = RecurrentStatePool(REQUESTS, width, 1, device, shapes={"sum": (HIDDEN,)})

    def __call__(self, inputs):
        def update(states, row):
            total = 0.7 * states["sum"] + row
            return {"sum": total}, total

        rows = self.embedding[inputs.input_ids]
        sums = self.states.scan(0, self.states.slots(inputs), update, rows)
        return ForwardOutput(next_token_logits=sums @ self.head)

    def plain(self, prompt: Sequence[int], count: int) -> list[int]:
        ids, total = list(prompt), torch.zeros(HIDDEN, device=self.head.device)
        for place in range(len(prompt) + count - 1):
            total = 0.7 * total + self.embedding[ids[place]]
            if place >= len(prompt) - 1:
                ids.append(int((total @ self.head).argmax()))
        return ids[len(prompt) :]


def recurrent_engine(forward, drafter, topk, *, states=None, slots=REQUESTS * CONTEXT, **options):
    """An engine over a forward without KV; ``states`` replaces the forward's own."""
    width, device = STEPS + 1 if topk == 1 else 1 + 2 * STEPS, forward.states.device
    requests = ReqToTokenPool(REQUESTS, CONTEXT, device)
    pool = MHATokenToKVPool(slots, 1, torch.float32, 1, 1, 0, device)
    states = forward.states if states is None else states
    return SpeculativeEngine(
        EngineModel(forward, SdpaAttention(requests, pool), states),
        drafter,
        spec=SpecConfig("NGRAM", STEPS, topk, width, linear_attention=True),
        sizes=BufferSizes(REQUESTS, CONTEXT, HIDDEN, VOCAB, torch.float32),
        device=device,
        **options,
    )
