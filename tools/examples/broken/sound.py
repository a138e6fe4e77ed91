"""A correct small verify step. Every other file of this folder adds one error to it.

graphkit audit tools.examples.broken.sound:target

The model writes to ``cache`` by KV slot, as to a KV pool, reads ``history`` by request row, and
divides its logits by a temperature on the device.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

import graphkit as gk
from graphkit.graphs import resolve_device

HIDDEN, VOCAB, WIDTH, REQUESTS, CONTEXT = 16, 32, 4, 8, 64
SLOTS = REQUESTS * WIDTH + 1


class Model(nn.Module):
    """Predicts from a row's token, its position and the history of its request."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.norm: nn.Module = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCAB)
        self.register_buffer("cache", torch.zeros(SLOTS, HIDDEN))
        self.register_buffer("history", torch.randn(REQUESTS + 1, HIDDEN))
        self.register_buffer("temperature", torch.ones(1))

    def state(self) -> dict[str, torch.Tensor]:
        """Return the tensors that a step, or the host between two steps, may change."""
        return {"cache": self.cache, "history": self.history, "temperature": self.temperature}

    def set_temperature(self, value: float) -> None:
        """Change the temperature of later steps."""
        self.temperature.fill_(value)

    def forward(self, inputs: gk.TargetVerifyInputs) -> gk.ForwardOutput:
        """Return logits and hidden states of the draft tokens."""
        hidden = self.norm(
            self.embed(inputs.input_ids) + self.position_term(inputs) + self.history_term(inputs)
        )
        self.cache.index_copy_(0, inputs.out_cache_loc, hidden)
        return gk.ForwardOutput(next_token_logits=self.scores(hidden), hidden_states=hidden)

    def position_term(self, inputs: gk.TargetVerifyInputs) -> torch.Tensor:
        """Return what the position of each row contributes, [T, 1]."""
        return inputs.positions[:, None] / CONTEXT

    def history_term(self, inputs: gk.TargetVerifyInputs) -> torch.Tensor:
        """Return what earlier steps of each row's request contribute, [T, H]."""
        of_requests = self.history[inputs.req_pool_indices] / inputs.seq_lens[:, None]
        width = inputs.tokens_per_request
        return of_requests.repeat_interleave(width, 0, output_size=inputs.num_tokens)

    def scores(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits, [T, V]."""
        return self.head(hidden) / self.temperature


def sample_batch(_mode: gk.ForwardMode, batch_size: int, seed: int) -> gk.TargetVerifyInputs:
    """Return a batch, deterministic for the same arguments."""
    random = np.random.default_rng([seed, batch_size])
    lengths = random.integers(5, CONTEXT - WIDTH, batch_size).astype(np.int32)
    requests = random.permutation(REQUESTS)[:batch_size]
    return gk.TargetVerifyInputs(
        req_pool_indices=1 + requests,
        seq_lens=lengths,
        input_ids=random.integers(0, VOCAB, batch_size * WIDTH),
        positions=(lengths[:, None] + np.arange(WIDTH)).ravel(),
        out_cache_loc=(1 + requests[:, None] * WIDTH + np.arange(WIDTH)).ravel(),
    )


def target_of(model: Model, name: str, device: str) -> gk.CaptureTarget:
    """Create a target for a model of this kind."""
    model.to(resolve_device(device)).requires_grad_(False)
    return gk.CaptureTarget(
        name=name,
        spec=gk.SpecConfig("NGRAM", num_steps=WIDTH - 1, topk=1, num_draft_tokens=WIDTH),
        sizes=gk.BufferSizes(REQUESTS, CONTEXT, HIDDEN, VOCAB, torch.float32),
        forwards={gk.ForwardMode.TARGET_VERIFY: model},
        sample_batch=sample_batch,
        weights=model,
        mutable_state=model.state(),
        host_values={"temperature": (model.set_temperature, [1.0, 0.5])},
        batch_sizes=[2, 4, REQUESTS],
    )


def target(device: str = "auto") -> gk.CaptureTarget:
    """Create the target; commands call this factory."""
    torch.manual_seed(0)
    return target_of(Model(), "sound", device)
