"""Small random causal language models of transformers, one per model type.

Sizes that most configurations share are in ``COMMON``; a configuration takes those that it has.
``KINDS`` has what a type needs beside them, so that every kind of layer occurs.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from types import MappingProxyType

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from graphkit.models.versions import RECURRENT, numbered

IS_OLD = numbered(transformers.__version__) < RECURRENT
needs_recurrent = pytest.mark.skipif(IS_OLD, reason="recurrent layers need a newer transformers")
VOCAB = 128
WINDOW = 8
"""Keys of a window, and tokens of a chunk, so that short texts are longer."""
COMMON = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 128, "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2,
    "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128, "n_inner": 96, "ffn_dim": 96,
    "word_embed_proj_dim": 64, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
    "sliding_window": WINDOW,
}  # fmt: skip
LATENT = {
    "head_dim": 8, "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "qk_head_dim": 24, "v_head_dim": 16,
    "n_routed_experts": 8, "n_group": 2, "topk_group": 1,
}  # fmt: skip
INDEX = {  # with so many heads, hardly any score is zero: equal scores are ambiguous
    "index_topk": WINDOW,
    "index_head_dim": 16,
    "index_n_heads": 16,
    "first_k_dense_replace": 1,
}
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "shared_expert_intermediate_size": 32,
}  # fmt: skip
MAMBA2 = {
    "mamba_d_state": 8, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_expand": 2,
    "mamba_chunk_size": 8,
}  # fmt: skip
ROTATION = {"rope_type": "default", "rope_theta": 10000.0}
ROPE = {"rope_parameters": ROTATION}
ENCODER = {"is_decoder": True, "pad_token_id": 0}  # an encoder, used as a decoder
INDEX_SHARED = {
    "num_hidden_layers": 3,
    "layer_types": ["indexed_attention"] * 3,
    "indexer_types": ["full", "shared", "full"],
}
KINDS: dict[str, dict[str, object]] = {
    "afmoe": {}, "apertus": {}, "arcee": {}, "aria_text": {},
    "axk1": LATENT | {"first_k_dense_replace": 1}, "axk2": LATENT | INDEX,
    "bailing_hybrid": LATENT, "bamba": MAMBA2 | {"attn_layer_indices": [1]}, "beam": {},
    "bert": ENCODER, "bert-generation": ENCODER, "biogpt": {}, "bitnet": {},
    "cohere": {}, "cohere2": {}, "cohere2_moe": {},
    "cohere_compass_text": {
        "rope_parameters": dict.fromkeys(("full_attention", "sliding_attention"), ROTATION),
    },
    "ctrl": {}, "cwm": {},
    "deepseek_v2": LATENT | {
        "first_k_dense_replace": 1, "topk_method": "greedy", "num_experts_per_tok": 2,
    },
    "deepseek_v3": LATENT | {"first_k_dense_replace": 1}, "deepseek_v32": LATENT | INDEX,
    "diffllama": {},  # attends twice in each layer
    "dots1": {
        "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
    },
    "dots3_note_text": LATENT | INDEX | {
        "head_dim": 24, "shared_experts_intermediate_size": 32,
        "layer_types": ["indexed_attention", "sliding_attention"],
        "per_layer_config": {1: {"q_lora_rank": 16, "qk_nope_head_dim": 16}},
    },
    "ernie": ENCODER, "ernie4_5": {},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2}, "exaone4": {}, "exaone_moe": {},
    "falcon_h1": MAMBA2 | {"mamba_d_ssm": 128}, "falcon_mamba": {"state_size": 8}, "flex_olmo": {},
    "flint": {}, "gemma": {}, "gemma2": {},
    "gemma3_text": {},
    "gemma3n_text": {  # the last two layers read the keys and values of the first two
        "num_kv_shared_layers": 2, "num_hidden_layers": 4, "intermediate_size": [96] * 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "activation_sparsity_pattern": [0.0] * 4, "vocab_size_per_layer_input": VOCAB,
        "hidden_size_per_layer_input": 8, "laurel_rank": 4, "pad_token_id": 0,
    },
    "gemma4_text": {
        "global_head_dim": 32, "attention_k_eq_v": True, "vocab_size_per_layer_input": VOCAB,
        "hidden_size_per_layer_input": 8,
    },
    "gemma4_unified_text": {"global_head_dim": 32},
    "glm": {}, "glm4": {}, "glm4_moe": {},
    "glm4_moe_lite": LATENT | {"first_k_dense_replace": 1},
    "glm_moe_dsa": LATENT | INDEX | INDEX_SHARED,
    "gpt2": {}, "gpt_bigcode": {}, "gpt_neox": {}, "gpt_oss": ROPE, "granite": {},
    "granite_swa": {}, "granitemoe": {},
    "granitemoehybrid": MAMBA2 | {
        "layer_types": ["mamba", "attention"], "shared_intermediate_size": 32,
    },
    "granitemoe_swa": {}, "granitemoeshared": {}, "helium": {},
    "hrm_text": {},  # its layers run several times
    "hunyuan_v1_dense": {"head_dim": 16}, "hunyuan_v1_moe": {"head_dim": 16}, "hy_v3": {},
    "hy_v4": LATENT | INDEX | INDEX_SHARED, "hyperclovax": {}, "internlm3": {},
    "iquestcoder": {}, "jais2": {},
    "jamba": {
        "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
        "expert_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 4,
    },
    "kimi_linear": LATENT | {"linear_head_dim": 16, "linear_num_heads": 4},
    "kolibri1": {}, "laguna": {}, "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1}, "lfm3": {},
    "llama": {},
    "llama4_text": {  # full layers scale their queries by the number of tokens before
        "attention_chunk_size": WINDOW, "intermediate_size_mlp": 96, "floor_scale": 6,
        "attn_scale": 0.5, "interleave_moe_layer_step": 1,
        "layer_types": ["chunked_attention", "full_attention"], "no_rope_layers": [1, 0],
    },
    "mamba": {"state_size": 8, "time_step_rank": 4},
    "mamba2": {
        "state_size": 8, "num_heads": 8, "head_dim": 16, "n_groups": 1, "chunk_size": 8,
    },
    "mellum": {}, "mimo_v2_flash": {}, "minicpm3": LATENT | {"scale_emb": 1, "dim_model_base": 64},
    "minimax_m2": {}, "ministral": {"head_dim": 16}, "ministral3": {}, "mistral": {},
    "mixtral": {}, "modernbert-decoder": {"pad_token_id": 0}, "nanochat": {},
    "nemotron": {"num_key_value_heads": 2, "head_dim": 16},
    "nemotron_h": {  # prompts have a least time step in transformers, single tokens have none
        "ssm_state_size": 8, "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 1,
        "chunk_size": 8, "time_step_min": 1e-9,
    },
    "olmo": {}, "olmo2": {}, "olmo3": {}, "olmo_hybrid": DELTA, "olmoe": {}, "opt": {},
    "persimmon": {}, "phi": {}, "phi3": ROPE, "phimoe": {}, "qwen2": {}, "qwen2_moe": {},
    "qwen3": {}, "qwen3_moe": {}, "qwen3_next": DELTA, "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": DELTA, "seed_oss": {}, "smollm3": {}, "solar_open": {}, "stablelm": {},
    "starcoder2": {}, "vaultgemma": {},
    "whisper": {
        "d_model": 64, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 96,
        "encoder_layers": 2, "encoder_attention_heads": 4,
    },
    "youtu": LATENT,
    "zamba": {
        "num_hidden_layers": 4, "layer_types": ["linear_attention", "hybrid"] * 2,
        "mamba_d_state": 8, "mamba_dt_rank": 4, "n_mamba_heads": 2, "attention_head_dim": 32,
    },
    "zamba2": {
        "mamba_d_state": 8, "n_mamba_heads": 8, "mamba_ngroups": 1, "mamba_expand": 2,
        "chunk_size": 8, "time_step_min": 1e-9, "use_mem_rope": True, "num_mem_blocks": 1,
        "layers_block_type": ["mamba", "hybrid"], "adapter_rank": 4,
    },
}  # fmt: skip
"""Settings by model type. All of them generate through graphkit what transformers generates."""
DIFFERENT_KINDS = (
    "llama",  # rotation, grouped queries
    "opt",  # learned positions
    "gemma2",  # windows and softcaps
    "gpt_oss",  # sinks and experts
    "qwen3_moe",  # experts
    "deepseek_v3",  # value heads of another width than key heads
    "qwen3_next",  # gated delta rule beside attention
    "falcon_h1",  # Mamba 2 and attention in each layer
    "mamba",  # no attention
    "stablelm",  # attention receives no keyword arguments of the model
)
"""Ten types that differ in what their layers compute."""


def small_config(
    kind: str, sizes: Mapping[str, object] = MappingProxyType({}), **changes: object
) -> PreTrainedConfig:
    """Return the configuration of a small model of a type.

    Those of ``sizes`` that the type has replace ``COMMON``; ``changes`` replace any setting.
    """
    base = AutoConfig.for_model(kind).get_text_config(decoder=True)
    base.allow_global_per_layer_attribute_access = True
    settings = {
        name: value
        for name, value in ({**COMMON, **sizes}).items()
        if hasattr(base, name)
        and not _is_computed(base, name)
        and (name == "pad_token_id" or getattr(base, name) is not None)
    }
    layer_types = getattr(base, "layer_types", None)
    if layer_types and not _is_computed(base, "layer_types"):
        occurring = list(dict.fromkeys(layer_types))
        settings["layer_types"] = (occurring * 2)[: max(2, len(occurring))]
        settings["num_hidden_layers"] = len(settings["layer_types"])
    # transformers writes into the dictionaries that it is given.
    return type(base)(**deepcopy(settings | KINDS.get(kind, {}) | changes))


def _is_computed(config: PreTrainedConfig, name: str) -> bool:
    attribute = config.attribute_map.get(name, name)
    return isinstance(getattr(type(config), attribute, None), property)


def small_model(kind: str, seed: int = 0, **changes: object) -> PreTrainedModel:
    """Create a small model of a type, in float32, with weights that make varied text.

    ``changes`` are settings of its configuration.
    """
    torch.manual_seed(seed)
    return random_model(kind, {}, std=0.15, dtype=torch.float32, **changes)


def random_model(
    kind: str, sizes: Mapping[str, object], *, std: float, dtype: torch.dtype, **changes: object
) -> PreTrainedModel:
    """Create a model of a type with normal weights; see ``small_config``."""
    model = AutoModelForCausalLM.from_config(small_config(kind, sizes, **changes), dtype=dtype)
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=std)
    return model.eval().requires_grad_(False)
