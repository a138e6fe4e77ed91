"""Verify graphs for Hugging Face transformers models, without changes to their code.

graphkit's paged attention replaces the model's attention through the registry of transformers. One
wrapper works for every decoder that uses the registry, here small models in the shape of Llama and
Qwen3, of Mixtral and Qwen3-MoE with experts, of Mistral, Gemma 2, Gemma 3 and gpt-oss with sliding
windows, of DeepSeek-V3 with latent attention, and of DeepSeek-V3.2, whose rows attend to the keys
that an indexer selects.

Each target names its model, so that commands and audits compare the two. The attention function
refuses arguments that it does not serve.

graphkit audit tools.examples.transformers_models:llama
"""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
)
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import graphkit as gk
from graphkit.attention import (
    AbsorbedProjections,
    IndexRows,
    PagedAttention,
    SdpaAttention,
    SparseAttention,
    TritonAttention,
)
from graphkit.kv import DSATokenToKVPool, MHATokenToKVPool, MLATokenToKVPool, ReqToTokenPool

REQUESTS, CONTEXT, WIDTH = 8, 64, 4
NO_MASK = torch.zeros(1, 1, 1, 1)
"""transformers passes a mask of four dimensions on as it is; the backend has that of the batch."""


WITHOUT_EFFECT = {"position_ids", "use_cache", "output_hidden_states", "output_router_logits"}
"""Arguments that transformers passes on to attention, and that change nothing in it."""


def paged(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    mask: torch.Tensor | None, *, inputs: gk.TargetVerifyInputs, backend: PagedAttention,
    scaling: float, dropout: float = 0.0, sliding_window: int | None = None,
    softcap: float | None = None, s_aux: torch.Tensor | None = None,
    indices: IndexRows | None = None, **others: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Attend in one layer, called by transformers: [1, heads, T, D] to [1, T, heads, D].

    Raises:
        NotImplementedError: The layer passes something that the backend does not serve.
    """
    unknown = [name for name, each in others.items() if name not in WITHOUT_EFFECT and each]
    unknown += ["a mask"] if mask is not None and mask.numel() > 1 else []
    unknown += ["dropout"] if dropout else []
    unknown += [f"scaling {scaling}"] if scaling != backend.scale else []
    if unknown:
        raise NotImplementedError(
            f"{type(module).__name__} passes {', '.join(unknown)} to its attention: not served"
        )
    query, key, value = (each[0].transpose(0, 1) for each in (query, key, value))
    layer, slots, metadata = module.layer_idx, inputs.out_cache_loc, inputs.attention
    if not hasattr(module, "absorbed"):
        options = {"window": sliding_window or 0, "softcap": softcap or 0.0, "sinks_N": s_aux}
        return backend.attend(layer, query, key, value, slots, metadata, **options)[None], None
    rows = module.absorbed.query(query), key, value
    if indices is None:
        attended = backend.attend(layer, *rows, slots, metadata)
    else:
        attended = backend.attend_selected(layer, *rows, indices, slots, metadata)
    return module.absorbed.value(attended)[None], None


def index_rows(
    indexer: Any, hidden: torch.Tensor, latent_query: torch.Tensor,
    rotation: tuple[torch.Tensor, torch.Tensor], *_: Any, **__: Any,
) -> IndexRows:  # fmt: skip
    """Return what an indexer of DeepSeek-V3.2 computes for rows, instead of the keys it selects."""
    size = indexer.qk_rope_head_dim
    query = indexer.wq_b(latent_query).unflatten(-1, (indexer.n_heads, -1))
    key = indexer.k_norm(indexer.wk(hidden))[:, :, None]
    rotated = apply_rotary_pos_emb(query[..., :size], key[..., :size], *rotation, unsqueeze_dim=2)
    query = torch.cat((rotated[0], query[..., size:]), -1)
    key = torch.cat((rotated[1], key[..., size:]), -1)
    scale = indexer.softmax_scale * indexer.n_heads**-0.5
    return IndexRows(query[0], indexer.weights_proj(hidden)[0] * scale, key[0, :, 0])


def attention_of(
    model: PreTrainedModel, requests: ReqToTokenPool, page_size: int = 1
) -> PagedAttention:
    """Create a KV pool and a backend for a model, and let the model attend through it."""
    AttentionInterface.register("paged_example", paged)
    model.config._attn_implementation = "paged_example"
    config, device = model.config, requests.device
    kind = TritonAttention if device.type == "cuda" else SdpaAttention
    tokens = -(-requests.max_context_len // page_size) * page_size
    common = (requests.size * tokens, page_size, model.dtype)
    layers, count = [each.self_attn for each in model.model.layers], config.num_hidden_layers
    if not hasattr(config, "kv_lora_rank"):
        dims = (config.num_key_value_heads, config.head_dim)
        pool = MHATokenToKVPool(*common, *dims, count, device)
        return kind(requests, pool, scale=layers[0].scaling)
    for each in layers:
        each.expand_kv = lambda latents, rotated: (latents, rotated)
        heads = (config.num_attention_heads, config.qk_nope_head_dim)
        each.absorbed = AbsorbedProjections(each.kv_b_proj.weight, *heads)
    dims = (config.kv_lora_rank, config.qk_rope_head_dim, count, device)
    if not hasattr(config, "index_topk"):
        return kind(requests, MLATokenToKVPool(*common, *dims), scale=layers[0].scaling)
    for each in layers:
        each.indexer.forward = partial(index_rows, each.indexer)
    pool = DSATokenToKVPool(*common, *dims, config.index_head_dim)
    topk = config.index_topk
    return SparseAttention(requests, pool, scale=layers[0].scaling, topk=topk, kind=kind)


def with_own_attention(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of a model that shares its weights and attends as transformers does."""
    tensors = (*model.parameters(), *model.buffers())
    own = deepcopy(model, {id(tensor): tensor for tensor in tensors})
    own.config._attn_implementation = "eager"
    return own


def run(
    model: PreTrainedModel, inputs: gk.TargetVerifyInputs, backend: PagedAttention
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits [T, V] and hidden states [T, H] of a batch's rows."""
    out = model(
        input_ids=inputs.input_ids[None], position_ids=inputs.positions[None],
        attention_mask=NO_MASK, use_cache=False, output_hidden_states=True, inputs=inputs,
        backend=backend,
    )  # fmt: skip
    return out.logits[0], out.hidden_states[-1][0]


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
    model, device = model.to(device).eval(), torch.device(device)
    # The pool of DeepSeek-V3.2 keeps index keys in FP8, so that it may select other keys.
    own = None if hasattr(model.config, "index_topk") else with_own_attention(model)
    config, slots = model.config, REQUESTS * CONTEXT
    requests = ReqToTokenPool(REQUESTS, CONTEXT, device)
    backend = attention_of(model, requests)
    table = 1 + torch.arange(slots).view(REQUESTS, CONTEXT)
    requests.req_to_token[1:] = table

    def forward(inputs: gk.TargetVerifyInputs) -> gk.ForwardOutput:
        return gk.ForwardOutput(next_token_logits=run(model, inputs, backend)[0])

    return gk.CaptureTarget(
        name=type(model).__name__,
        spec=gk.SpecConfig("NGRAM", num_steps=WIDTH - 1, topk=1, num_draft_tokens=WIDTH),
        sizes=gk.BufferSizes(REQUESTS, CONTEXT, config.hidden_size, config.vocab_size, model.dtype),
        forwards={gk.ForwardMode.TARGET_VERIFY: forward},
        sample_batch=Samples(table, config.vocab_size),
        weights=model,
        mutable_state=backend.kv_pool.tensors(),
        attention=backend,
        model=own,
    )


SMALL = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": CONTEXT,
}  # fmt: skip


WINDOW = 8
LATENT = {
    "head_dim": 8, "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "n_routed_experts": 8,
    "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
}  # fmt: skip
KINDS = {
    "llama": {},
    "qwen3": {},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "mistral": {"sliding_window": WINDOW},
    "gemma2": {
        "sliding_window": WINDOW, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 1.0,
        "tie_word_embeddings": False,
    },
    "gemma3_text": {
        "sliding_window": WINDOW, "query_pre_attn_scalar": 16, "tie_word_embeddings": False,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "gpt_oss": {
        "sliding_window": WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "deepseek_v3": LATENT | {"first_k_dense_replace": 1},
    "deepseek_v32": LATENT | {
        "index_topk": 6, "index_head_dim": 16, "index_n_heads": 8,
        "mlp_layer_types": ["dense", "sparse"],
    },
}  # fmt: skip
"""Settings of each shape by model type. Two layers of Gemma 2 and gpt-oss alternate."""


def random_model(
    kind: str, dtype: torch.dtype = torch.float32, experts: str = "batched_mm"
) -> PreTrainedModel:
    """Create a small random model; experts run as batched products, which can be captured."""
    config = AutoConfig.for_model(kind, **SMALL | KINDS[kind])
    torch.manual_seed(0)
    has_experts = hasattr(config, "num_experts_per_tok")
    options = {"experts_implementation": experts} if has_experts else {}
    return AutoModelForCausalLM.from_config(config, dtype=dtype, **options)


def llama(device: str = "cpu") -> gk.CaptureTarget:
    """Create a target of a small Llama."""
    return wrapped(random_model("llama"), device)


def qwen3(device: str = "cpu") -> gk.CaptureTarget:
    """Create a target of a small Qwen3."""
    return wrapped(random_model("qwen3"), device)


def mixtral(device: str = "cpu") -> gk.CaptureTarget:
    """Create a target of a small Mixtral: two of four experts per token."""
    return wrapped(random_model("mixtral"), device)


def qwen3_moe(device: str = "cpu") -> gk.CaptureTarget:
    """Create a target of a small Qwen3-MoE: two of four experts per token."""
    return wrapped(random_model("qwen3_moe"), device)


def mistral(device: str = "cpu") -> gk.CaptureTarget:
    """Create a target of a small Mistral: a window in every layer."""
    return wrapped(random_model("mistral"), device)


def gemma2(device: str = "cpu") -> gk.CaptureTarget:
    """Create a target of a small Gemma 2: a window in every other layer, and softcaps."""
    return wrapped(random_model("gemma2"), device)


def gemma3(device: str = "cpu") -> gk.CaptureTarget:
    """Create a target of a small Gemma 3: a window in the first of its two layers."""
    return wrapped(random_model("gemma3_text"), device)


def gpt_oss(device: str = "cpu") -> gk.CaptureTarget:
    """Create a target of a small gpt-oss: a window in every other layer, sinks, and experts."""
    return wrapped(random_model("gpt_oss"), device)


def deepseek_v3(device: str = "cpu") -> gk.CaptureTarget:
    """Create a target of a small DeepSeek-V3: latent attention, and experts in its last layer."""
    return wrapped(random_model("deepseek_v3"), device)


def deepseek_v32(device: str = "cpu") -> gk.CaptureTarget:
    """Create a target of a small DeepSeek-V3.2: each row attends to the six best keys."""
    return wrapped(random_model("deepseek_v32"), device)


def main() -> int:
    """Capture the models, compare every replay with the eager forward, and print the results."""
    mismatches = 0
    for factory in (
        llama, qwen3, mixtral, qwen3_moe, mistral, gemma2, gemma3, gpt_oss, deepseek_v3,
        deepseek_v32,
    ):  # fmt: skip
        record = gk.capture_target(factory(), batch_sizes=[8], device="cpu")
        print(f"{record.target}: {len(record.mismatches)} mismatches")
        mismatches += len(record.mismatches)
    return 1 if mismatches else 0


if __name__ == "__main__":
    raise SystemExit(main())
