"""A CaptureTarget for a custom model and the EAGLE head that drafts for it.

The target declares forwards, sample batches, weights, mutable state, attention, and a host value
that graphs must not bake in. Run it with:

graphkit capture tools.examples.own_target:target
graphkit audit tools.examples.own_target:target
pytest --graphkit tools.examples.own_target:target
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

import graphkit as gk
from graphkit.engine.attention import PagedAttention, SdpaAttention, TritonAttention
from graphkit.engine.kv import MHATokenToKVPool, ReqToTokenPool

HIDDEN, HEADS, VOCAB, REQUESTS, CONTEXT = 64, 4, 256, 8, 64
STEPS, WIDTH = 3, 4  # a chain of three drafts, and the bonus token
VERIFY, DRAFT = gk.ForwardMode.TARGET_VERIFY, gk.ForwardMode.DRAFT
EXTEND = gk.ForwardMode.DRAFT_EXTEND_V2
SLOTS = 1 + np.arange(REQUESTS * CONTEXT).reshape(REQUESTS, CONTEXT)  # slot 0 is for pad rows


class Layer(nn.Module):
    """Attention over the KV pool of one model: [T, HIDDEN] to [T, HIDDEN]."""

    def __init__(self, attention: PagedAttention) -> None:
        super().__init__()
        self.attention = attention
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, hidden: torch.Tensor, inputs: Any) -> torch.Tensor:
        """Store this step's keys and values, then attend with the metadata ``inputs.attention``."""
        rows = self.qkv(hidden).view(-1, 3, HEADS, HIDDEN // HEADS).unbind(1)
        attended = self.attention.attend(0, *rows, inputs.out_cache_loc, inputs.attention)
        return hidden + self.out(attended.flatten(1))


class Target(nn.Module):
    """Predicts from the token, the position and the attended rows."""

    def __init__(self, attention: PagedAttention) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, VOCAB)
        self.layer = Layer(attention)
        # A tensor, which every replay reads. The graph would bake in a Python number at capture.
        self.register_buffer("temperature", torch.ones(()))

    def embedded(self, inputs: gk.Inputs) -> torch.Tensor:
        """Embed tokens and positions, [T, HIDDEN]."""
        return self.embed(inputs.input_ids) + inputs.positions[:, None] / CONTEXT

    def forward(self, inputs: gk.TargetVerifyInputs) -> gk.ForwardOutput:
        """Run TARGET_VERIFY. The head drafts from the hidden states."""
        hidden = self.layer(self.embedded(inputs), inputs)
        return gk.ForwardOutput(
            next_token_logits=self.head(hidden) / self.temperature, hidden_states=hidden
        )


class EagleHead(nn.Module):
    """Predicts the token after the next from a token and the hidden state before it."""

    def __init__(self, target: Target, attention: PagedAttention) -> None:
        super().__init__()
        self.target, self.mix, self.layer = target, nn.Linear(2 * HIDDEN, HIDDEN), Layer(attention)

    def forward(self, inputs: gk.DraftInputs | gk.DraftExtendInputs) -> gk.ForwardOutput:
        """Run one DRAFT step, or DRAFT_EXTEND_V2 over the rows of the last verify."""
        both = torch.cat([self.target.embedded(inputs), inputs.hidden_states], dim=-1)
        hidden = self.layer(self.mix(both), inputs)
        return gk.ForwardOutput(next_token_logits=self.target.head(hidden), hidden_states=hidden)


def sample_batch(device: str, mode: gk.ForwardMode, batch_size: int, seed: int) -> gk.Inputs:
    """Return a batch, deterministic: numpy arrays, and hidden states on the device."""
    random = np.random.default_rng([seed, batch_size])
    lengths = random.integers(1, CONTEXT - WIDTH, batch_size)
    positions, request = lengths[:, None] + np.arange(WIDTH), np.arange(batch_size)[:, None]
    tokens = random.integers(0, VOCAB, positions.shape)
    hidden = random.standard_normal((positions.size, HIDDEN), np.float32)
    hidden = torch.from_numpy(hidden).to(device)
    per_request = {"req_pool_indices": np.arange(1, batch_size + 1), "seq_lens": lengths}
    per_row = {
        "input_ids": tokens.ravel(),
        "positions": positions.ravel(),
        "out_cache_loc": SLOTS[request, positions].ravel(),
    }
    if mode is VERIFY:
        return gk.TargetVerifyInputs(**per_request, **per_row)
    if mode is EXTEND:  # seq_lens includes the rows being extended
        counts = gk.AcceptedCounts.from_tokens(random.integers(1, WIDTH + 1, batch_size))
        per_request["seq_lens"] = lengths + WIDTH
        per_request["extend_seq_lens"] = np.full(batch_size, WIDTH)
        return gk.DraftExtendInputs(
            **per_request, **per_row, **counts.fields(), hidden_states=hidden
        )
    return gk.DraftInputs(
        **per_request,
        topk_p=np.ones((batch_size, 1), np.float32),
        topk_index=tokens[:, :1],
        hidden_states=hidden[:batch_size],
        positions=lengths,
        out_cache_loc=SLOTS[request, positions[:, :STEPS]].ravel(),
    )


def attention_over(requests: ReqToTokenPool) -> PagedAttention:
    """Create an attention backend over a new KV pool; each model needs its own."""
    device, dim = requests.device, HIDDEN // HEADS
    pool = MHATokenToKVPool(REQUESTS * CONTEXT, 1, torch.float32, HEADS, dim, 1, device)
    return (TritonAttention if device.type == "cuda" else SdpaAttention)(requests, pool)


def target(device: str = "cpu") -> gk.CaptureTarget:
    """Create the target. Commands call this factory with the device that they run on."""
    torch.manual_seed(0)
    requests = ReqToTokenPool(REQUESTS, CONTEXT, torch.device(device))
    requests.req_to_token[1:] = torch.from_numpy(SLOTS)  # row 0 is for pad rows
    attention = {"target": attention_over(requests), "head": attention_over(requests)}
    model = Target(attention["target"])
    head = EagleHead(model, attention["head"]).to(device)  # the target is a submodule
    return gk.CaptureTarget(
        name="own model",
        spec=gk.SpecConfig("EAGLE", num_steps=STEPS, topk=1, num_draft_tokens=WIDTH),
        sizes=gk.BufferSizes(REQUESTS, CONTEXT, HIDDEN, VOCAB, torch.float32),
        forwards={VERIFY: model, DRAFT: head, EXTEND: head},
        sample_batch=partial(sample_batch, device),
        weights=head,
        mutable_state={
            f"{name} {part}": tensor
            for name, backend in attention.items()
            for part, tensor in backend.kv_pool.tensors().items()
        },
        host_values={"temperature": (model.temperature.fill_, [1.0, 0.5])},
        attention={
            VERIFY: attention["target"], DRAFT: attention["head"], EXTEND: attention["head"],
        },
    )  # fmt: skip


def main() -> int:
    """Capture the target, compare every replay with the eager forward, and print the result."""
    record = gk.capture_target(target(), batch_sizes=[1, 4], device="cpu")
    modes = ", ".join(mode.mode for mode in record.modes)
    print(f"{record.target}, {modes}: {len(record.mismatches)} mismatches")
    return 1 if record.mismatches else 0


if __name__ == "__main__":
    raise SystemExit(main())
