"""The least that a CaptureTarget needs: forwards and sample batches, here of a Llama and a Mixtral.

The KV cache is the forward's own, with a row per request. Neither it nor the weights are declared:
an audit names them and finds no error.

graphkit audit tools.examples.minimal_target:dense
graphkit audit tools.examples.minimal_target:moe
"""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf
from torch.nn.functional import scaled_dot_product_attention

import graphkit as gk

REQUESTS, CONTEXT, WIDTH, VOCAB, HIDDEN, LAYERS, HEADS = 4, 32, 4, 256, 64, 2, 4
SIZES = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 2 * HIDDEN,
    "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": HEADS,
}  # fmt: skip


def attend(
    module: Any, q: Any, k: Any, v: Any, _mask: Any, *, at: Any, cache: Any, **_: Any
) -> tuple[torch.Tensor, None]:
    """Attend to the cache at each token's row: [1, HEADS, T, D] to [1, T, HEADS, D]."""
    q, k, v = (each[0].transpose(0, 1) for each in (q, k, v))
    keys, values = cache[module.layer_idx]  # [REQUESTS + 1, CONTEXT, HEADS, D]
    keys[at], values[at] = k, v
    rows, positions = at
    visible = torch.arange(CONTEXT, device=rows.device) <= positions[:, None, None, None]
    keys, values = keys[rows].transpose(1, 2), values[rows].transpose(1, 2)
    attended = scaled_dot_product_attention(q[:, :, None], keys, values, visible)
    return attended[None, :, :, 0], None


def sample_batch(_mode: gk.ForwardMode, batch_size: int, seed: int) -> gk.TargetVerifyInputs:
    """Return a batch in which every request has 8 committed tokens and 4 new ones."""
    tokens = batch_size * WIDTH
    generator = torch.Generator().manual_seed(seed)
    return gk.TargetVerifyInputs(
        req_pool_indices=torch.arange(1, batch_size + 1),
        seq_lens=torch.full((batch_size,), 8, dtype=torch.int32),
        input_ids=torch.randint(VOCAB, (tokens,), generator=generator),
        positions=8 + torch.arange(tokens) % WIDTH,
        out_cache_loc=1 + torch.arange(tokens),  # for KV pools of slots; not read here
    )


def target_of(model: hf.PreTrainedModel, device: str) -> gk.CaptureTarget:
    """Create a target of a model with nothing but what every target needs."""
    hf.AttentionInterface.register("rows", attend)
    model.config._attn_implementation = "rows"
    model = model.to(device).eval()
    shape = LAYERS, 2, REQUESTS + 1, CONTEXT, HEADS, HIDDEN // HEADS  # row 0 is for pad rows
    cache = torch.zeros(shape, dtype=model.dtype, device=device)

    def forward(inputs: gk.TargetVerifyInputs) -> gk.ForwardOutput:
        rows = inputs.req_pool_indices.repeat_interleave(WIDTH, output_size=inputs.num_tokens)
        logits = model(
            input_ids=inputs.input_ids[None], position_ids=inputs.positions[None],
            use_cache=False, at=(rows, inputs.positions), cache=cache,
        ).logits  # fmt: skip
        return gk.ForwardOutput(next_token_logits=logits[0])

    return gk.CaptureTarget(
        name=type(model).__name__,
        spec=gk.SpecConfig("NGRAM", num_steps=WIDTH - 1, topk=1, num_draft_tokens=WIDTH),
        sizes=gk.BufferSizes(REQUESTS, CONTEXT, HIDDEN, VOCAB, model.dtype),
        forwards={gk.ForwardMode.TARGET_VERIFY: forward},
        sample_batch=sample_batch,
    )


def dense(device: str = "cpu") -> gk.CaptureTarget:
    """Create a target of a small Llama."""
    torch.manual_seed(0)
    return target_of(hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES)), device)


def moe(device: str = "cpu") -> gk.CaptureTarget:
    """Create a target of a small Mixtral; grouped products of experts need bfloat16."""
    torch.manual_seed(0)
    config = hf.MixtralConfig(**SIZES, num_local_experts=4, experts_implementation="grouped_mm")
    return target_of(hf.MixtralForCausalLM(config).bfloat16(), device)


def main() -> int:
    """Capture both models, compare every replay with the eager forward, and print the results."""
    mismatches = 0
    for factory in (dense, moe):
        record = gk.capture_target(factory(), batch_sizes=[4], device="cpu")
        print(f"{record.target}: {len(record.mismatches)} mismatches")
        mismatches += len(record.mismatches)
    return 1 if mismatches else 0


if __name__ == "__main__":
    raise SystemExit(main())
