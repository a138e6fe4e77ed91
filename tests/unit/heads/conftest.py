"""Small random targets and draft heads, folders of heads, and the training tool."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from training.folders import save_draft_head
from transformers import LlamaConfig

from graphkit.models.heads.eagle import Eagle3Head, EagleHead
from small_llama import small_llama

TOOLS = Path(__file__).parents[3] / "tools"
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


class Target(nn.Module):
    """What heads use of a target, with random weights: a ``HeadSources`` that can be cast."""

    group = None

    def __init__(self, vocab_size=96, hidden_size=64, num_hidden_layers=2):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, hidden_size)
        self.lm_head = nn.Linear(hidden_size, vocab_size, bias=False)
        self.lm_head.weight = self.embedding.weight
        self.vocab_size, self.hidden_size = vocab_size, hidden_size
        self.num_hidden_layers = num_hidden_layers

    def logits(self, hidden):
        return self.lm_head(hidden)


@pytest.fixture
def make_target():
    """``make_target(...)``: another target."""
    return Target


@pytest.fixture
def checkpoint(eagle, tmp_path):
    """The folder of an EAGLE head that a test may damage."""
    save_draft_head(eagle, tmp_path)
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
    return randomised(Target())


@pytest.fixture
def eagle(target):
    torch.manual_seed(1)
    return randomised(EagleHead(HEAD, target))


@pytest.fixture
def llama():
    """A language model as the target of training."""
    sizes = {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 80}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    return small_llama(std=0.15, max_position_embeddings=128, **sizes, **heads)


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
