"""Small random models, draft heads, checkpoint folders, and the training tool."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from graphkit.models.heads.config import LlamaConfig
from graphkit.models.heads.eagle import EagleHead
from graphkit.models.heads.eagle3 import Eagle3Head
from graphkit.models.sharded import LlamaModel, MTPHead, save_checkpoint

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
TOOLS = Path(__file__).parents[3] / "tools"
TARGET = LlamaConfig(
    vocab_size=96,
    hidden_size=64,
    intermediate_size=80,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=128,
    tie_word_embeddings=True,
)
HEAD = LlamaConfig(
    vocab_size=96,
    hidden_size=64,
    intermediate_size=112,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=24,
    max_position_embeddings=128,
    rms_norm_eps=1e-3,
    rope_theta=500.0,
)
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
        case "mistral":
            return hf.MistralForCausalLM(hf.MistralConfig(**SIZES, head_dim=24))
        case "mistral-window":
            return hf.MistralForCausalLM(hf.MistralConfig(**SIZES, sliding_window=9))
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
    """``hf_model(kind)``: a transformers model with random parameters."""

    def make(kind):
        torch.manual_seed(0)
        model = build(kind).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.normal_(1.0 if "norm" in name else 0.0, 0.15)
        return model

    return make


@pytest.fixture
def checkpoint(tmp_path):
    """A Llama checkpoint folder that a test may damage."""
    config = replace(TARGET, num_hidden_layers=3, tie_word_embeddings=False)
    save_checkpoint(LlamaModel(config), tmp_path)
    return tmp_path


@pytest.fixture
def ids():
    return torch.randint(96, (2, 48), generator=torch.Generator().manual_seed(1))


def randomised(module):
    """Draw random parameters, norms around 1, without gradients."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.15)
    return module.eval().requires_grad_(False)


@pytest.fixture
def target():
    """A random target for draft heads."""
    torch.manual_seed(0)
    return randomised(LlamaModel(TARGET))


@pytest.fixture
def eagle(target):
    torch.manual_seed(1)
    return randomised(EagleHead(HEAD, target))


@pytest.fixture
def mtp(target):
    torch.manual_seed(2)
    config = LlamaConfig.from_dict(HEAD.to_dict() | {"num_hidden_layers": 3})
    return randomised(MTPHead(config, target))


@pytest.fixture
def eagle3(target):
    """A head whose draft vocabulary is every third token of the target's."""
    torch.manual_seed(3)
    head = randomised(Eagle3Head(HEAD, target, aux_layers=(0, 1, 2), draft_vocab_size=32))
    head.d2t.copy_(2 * torch.arange(32))
    return head


@pytest.fixture(scope="session")
def tool():
    """The training command as a module, with its folder on the path."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(TOOLS)
        yield importlib.import_module("train_reference")


@pytest.fixture(scope="session")
def training(tool):
    """The modules of the training command by name."""
    names = ("corpus", "loop", "losses", "recipes", "unroll")
    return SimpleNamespace(**{name: importlib.import_module(f"training.{name}") for name in names})
