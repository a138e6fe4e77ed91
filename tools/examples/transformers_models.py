"""Verify graphs for Hugging Face transformers models, without changes to their code.

graphkit's paged attention replaces the model's attention through the registry of transformers. One
wrapper works for every decoder that uses the registry, here a small Llama and a small Qwen3.

graphkit audit tools.examples.transformers_models:llama
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import (
    AttentionInterface,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import graphkit as gk
from graphkit.attention import PagedAttention, SdpaAttention, TritonAttention
from graphkit.kv import MHATokenToKVPool, ReqToTokenPool

REQUESTS, CONTEXT, WIDTH = 8, 64, 4


def paged(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _mask: Any,
    *, inputs: gk.TargetVerifyInputs, backend: PagedAttention, **_: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Attend in one layer, called by transformers: [1, heads, T, D] to [1, T, heads, D]."""
    rows = (each[0].transpose(0, 1) for each in (query, key, value))
    attended = backend.attend(module.layer_idx, *rows, inputs.out_cache_loc, inputs.attention)
    return attended[None], None


class Samples:
    """Creates batches in which every request has 8 committed tokens and 4 new ones.

    Args:
        table: KV slots of each request, [REQUESTS, CONTEXT].
        vocab_size: Upper bound of the token ids.
    """

    def __init__(self, table: torch.Tensor, vocab_size: int) -> None:
        self.table, self.vocab_size = table.numpy(), vocab_size

    def __call__(self, _mode: gk.ForwardMode, batch_size: int, seed: int) -> gk.TargetVerifyInputs:
        """Return a batch, deterministic for the same arguments."""
        positions = np.tile(np.arange(8, 8 + WIDTH), batch_size)
        rows = np.repeat(np.arange(batch_size), WIDTH)
        return gk.TargetVerifyInputs(
            req_pool_indices=np.arange(1, batch_size + 1),
            seq_lens=np.full(batch_size, 8, dtype=np.int32),
            input_ids=np.random.default_rng(seed).integers(0, self.vocab_size, len(rows)),
            positions=positions,
            out_cache_loc=self.table[rows, positions],
        )


def wrapped(model: PreTrainedModel, device: torch.device | str) -> gk.CaptureTarget:
    """Create a target for a transformers model."""
    AttentionInterface.register("graphkit", paged)
    model = model.to(device).eval()
    model.config._attn_implementation = "graphkit"
    config, device = model.config, torch.device(device)
    requests = ReqToTokenPool(REQUESTS, CONTEXT, device)
    heads, dim = config.num_key_value_heads, config.head_dim
    slots = REQUESTS * CONTEXT
    pool = MHATokenToKVPool(slots, 1, model.dtype, heads, dim, config.num_hidden_layers, device)
    kind = TritonAttention if device.type == "cuda" else SdpaAttention
    backend = kind(requests, pool, scale=dim**-0.5)
    table = 1 + torch.arange(slots).view(REQUESTS, CONTEXT)
    requests.req_to_token[1:] = table

    def forward(inputs: gk.TargetVerifyInputs) -> gk.ForwardOutput:
        logits = model(
            input_ids=inputs.input_ids[None], position_ids=inputs.positions[None],
            use_cache=False, inputs=inputs, backend=backend,
        ).logits  # fmt: skip
        return gk.ForwardOutput(next_token_logits=logits[0])

    return gk.CaptureTarget(
        name=type(model).__name__,
        spec=gk.SpecConfig("NGRAM", num_steps=WIDTH - 1, topk=1, num_draft_tokens=WIDTH),
        sizes=gk.BufferSizes(REQUESTS, CONTEXT, config.hidden_size, config.vocab_size, model.dtype),
        forwards={gk.ForwardMode.TARGET_VERIFY: forward},
        sample_batch=Samples(table, config.vocab_size),
        weights=model,
        mutable_state=pool.tensors(),
        attention=backend,
    )


SMALL = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": CONTEXT,
}  # fmt: skip


def llama(device: str = "cpu") -> gk.CaptureTarget:
    """Create a target of a small Llama."""
    torch.manual_seed(0)
    return wrapped(LlamaForCausalLM(LlamaConfig(**SMALL)), device)


def qwen3(device: str = "cpu") -> gk.CaptureTarget:
    """Create a target of a small Qwen3."""
    torch.manual_seed(0)
    return wrapped(Qwen3ForCausalLM(Qwen3Config(**SMALL)), device)


def main() -> int:
    """Capture both models, compare every replay with the eager forward, and print the results."""
    mismatches = 0
    for factory in (llama, qwen3):
        record = gk.capture_target(factory(), batch_sizes=[1, 8], device="cpu")
        print(f"{record.target}: {len(record.mismatches)} mismatches")
        mismatches += len(record.mismatches)
    return 1 if mismatches else 0


if __name__ == "__main__":
    raise SystemExit(main())
