"""Small random checkpoints that transformers itself wrote."""

from __future__ import annotations

import pytest
import torch

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "attn_implementation": "eager",
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def build(kind):
    import transformers as hf

    match kind:
        case "llama":
            return hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES, rms_norm_eps=1e-3))
        case "llama-wide-heads":
            return hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES, head_dim=24))
        case "llama-llama3":
            return hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES, rope_parameters=LLAMA3))
        case "llama-tied-bias":
            config = hf.LlamaConfig(**SIZES, tie_word_embeddings=True, attention_bias=True)
            return hf.LlamaForCausalLM(config)
        case "qwen2":
            rope = {"rope_type": "default", "rope_theta": 1e6}
            return hf.Qwen2ForCausalLM(hf.Qwen2Config(**SIZES, rope_parameters=rope))
        case "qwen3":
            config = hf.Qwen3Config(**SIZES, head_dim=32, tie_word_embeddings=True)
            return hf.Qwen3ForCausalLM(config)
        case "qwen3-bias":
            return hf.Qwen3ForCausalLM(hf.Qwen3Config(**SIZES, head_dim=16, attention_bias=True))
    raise AssertionError(kind)


@pytest.fixture
def hf_model():
    """Return a function from a kind to transformers' model with every parameter random."""

    def make(kind):
        torch.manual_seed(0)
        model = build(kind).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.normal_(1.0 if "norm" in name else 0.0, 0.15)
        return model

    return make


@pytest.fixture
def checkpoint(hf_model, tmp_path):
    """A Llama checkpoint folder, to be damaged."""
    hf_model("llama").save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def ids():
    return torch.randint(96, (2, 48), generator=torch.Generator().manual_seed(1))
