"""A small verify step with nothing wrong. Every other file of this folder breaks one thing of it.

graphkit audit tools.examples.broken.sound:target

The model keeps what each slot said in ``cache``, as a KV pool does, reads what each request said in
``said``, and divides its scores by a temperature that lies on the device.
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
    """Scores every row by its token, its position and what its request said before."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.norm: nn.Module = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCAB)
        self.register_buffer("cache", torch.zeros(SLOTS, HIDDEN))
        self.register_buffer("said", torch.randn(REQUESTS + 1, HIDDEN))
        self.register_buffer("temperature", torch.ones(1))

    def state(self) -> dict[str, torch.Tensor]:
        """What a step, or the host between two steps, may change."""
        return {"cache": self.cache, "said": self.said, "temperature": self.temperature}

    def set_temperature(self, value: float) -> None:
        """Change it for the steps to come."""
        self.temperature.fill_(value)

    def forward(self, inputs: gk.TargetVerifyInputs) -> gk.ForwardOutput:
        """Score the drafted tokens."""
        hidden = self.norm(self.embed(inputs.input_ids) + self.place(inputs) + self.past(inputs))
        self.cache.index_copy_(0, inputs.out_cache_loc, hidden)
        return gk.ForwardOutput(next_token_logits=self.scores(hidden), hidden_states=hidden)

    def place(self, inputs: gk.TargetVerifyInputs) -> torch.Tensor:
        """What the position of each row adds, [T, 1]."""
        return inputs.positions[:, None] / CONTEXT

    def past(self, inputs: gk.TargetVerifyInputs) -> torch.Tensor:
        """What its request said before adds to each row, [T, H]."""
        of_requests = self.said[inputs.req_pool_indices] / inputs.seq_lens[:, None]
        width = inputs.tokens_per_request
        return of_requests.repeat_interleave(width, 0, output_size=inputs.num_tokens)

    def scores(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits, [T, V]."""
        return self.head(hidden) / self.temperature


def sample_batch(_mode: gk.ForwardMode, batch_size: int, seed: int) -> gk.TargetVerifyInputs:
    """A live batch, the same for the same arguments."""
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
    """A target around a model of this kind."""
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
    """The factory that the command calls."""
    torch.manual_seed(0)
    return target_of(Model(), "sound", device)
