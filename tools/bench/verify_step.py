"""The verify step of the benchmarks: one batch, and a forward that reads every field of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

import graphkit as gk
from graphkit.buffers import Axis, Rows, declare
from graphkit.engine.attention import TritonAttention
from graphkit.engine.kv import MHATokenToKVPool, ReqToTokenPool

LIVE, CAPTURED, WIDTH, HIDDEN, LAYERS, VOCAB, CONTEXT = 48, 64, 4, 4096, 24, 1024, 4096
DEVICE = torch.device("cuda", 0)
HOST_FIELDS = (
    "req_pool_indices", "seq_lens", "input_ids", "positions", "out_cache_loc",
    "temperatures", "top_ps", "adapter_ids",
)  # fmt: skip


@dataclass(kw_only=True, eq=False)
class StepInputs(gk.TargetVerifyInputs):
    """TargetVerifyInputs with three more fields per request, as serving engines have them."""

    temperatures: Rows = declare(Axis.REQUEST, torch.float32, "sampling temperature", pad=1)
    top_ps: Rows = declare(Axis.REQUEST, torch.float32, "nucleus sampling threshold", pad=1)
    adapter_ids: Rows = declare(Axis.REQUEST, torch.int32, "LoRA adapter, 0 for none")


class Model(nn.Module):
    """A stack of linear blocks that reads every field, so that no variant can omit one."""

    def __init__(self) -> None:
        super().__init__()
        make = {"device": DEVICE, "dtype": torch.bfloat16}
        self.layers = nn.ModuleList(
            nn.Linear(HIDDEN, HIDDEN, bias=False, **make) for _ in range(LAYERS)
        )
        self.norm = nn.RMSNorm(HIDDEN, **make)
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False, **make)

    def forward(
        self, embeds: torch.Tensor, *host: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Map embeddings [T, H] and host fields [B] or [T] to logits [T, V] and hidden [T, H]."""
        per_request = sum(x.float() for x in host if x.shape[0] * WIDTH == embeds.shape[0])
        per_token = sum(x.float() for x in host if x.shape[0] == embeds.shape[0])
        seen = (per_token + per_request.repeat_interleave(WIDTH, output_size=len(embeds))) * 1e-6
        hidden = embeds + seen[:, None].to(embeds.dtype)
        for layer in self.layers:
            hidden = hidden + torch.relu(layer(self.norm(hidden)))
        return self.head(hidden), hidden


def host_arrays() -> dict[str, np.ndarray]:
    """Return the host fields of the batch."""
    tokens = LIVE * WIDTH
    return {
        "req_pool_indices": np.arange(1, LIVE + 1),
        "seq_lens": np.arange(LIVE, dtype=np.int32) + 100,
        "input_ids": np.arange(tokens) % VOCAB,
        "positions": np.arange(tokens) + 100,
        "out_cache_loc": np.arange(tokens) + 1,
        "temperatures": np.full(LIVE, 0.7, dtype=np.float32),
        "top_ps": np.full(LIVE, 0.9, dtype=np.float32),
        "adapter_ids": np.zeros(LIVE, dtype=np.int32),
    }


def graphkit_runner(model: Model, sizes: list[int] | None) -> gk.TargetVerifyRunner:
    """Create and capture a runner over the model. It also computes attention metadata."""

    def forward(inputs: StepInputs) -> gk.ForwardOutput:
        logits, hidden = model(inputs.input_embeds, *(getattr(inputs, n) for n in HOST_FIELDS))
        return gk.ForwardOutput(next_token_logits=logits, hidden_states=hidden)

    runner = gk.TargetVerifyRunner(
        forward,
        spec=gk.SpecConfig("EAGLE", num_steps=3, topk=1, num_draft_tokens=WIDTH),
        sizes=gk.BufferSizes(CAPTURED, CONTEXT, HIDDEN, VOCAB, torch.bfloat16),
        batch_sizes=sizes,
        optional_fields=["input_embeds"],
        inputs_type=StepInputs,
        backend=gk.CudaBackend(DEVICE),
        attention=TritonAttention(
            ReqToTokenPool(CAPTURED, CONTEXT, DEVICE),
            MHATokenToKVPool(CONTEXT, 1, torch.bfloat16, 8, 128, 1, DEVICE),
        ),
    )
    runner.capture()
    return runner
