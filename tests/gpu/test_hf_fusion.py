"""Fused models of transformers on CUDA: their nodes, and the logits of the model."""

from __future__ import annotations

import pytest
import torch

import graphkit as gk
from small_models import small_model

hf = pytest.importorskip("graphkit.models")

pytestmark = pytest.mark.gpu
MODE = gk.ForwardMode.TARGET_VERIFY


def nodes(target):
    with target.runner(MODE, device="cuda", batch_sizes=[2]) as runner:
        runner.capture()
        return runner.inspect(2).nodes


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
def test_a_fused_step_has_half_the_nodes_of_a_plain_one(kind, tmp_path):
    small_model(kind).to(torch.bfloat16).save_pretrained(tmp_path)
    fused, plain = (
        nodes(hf.load(tmp_path, device="cuda", fuse=fuse).target(max_batch_size=2))
        for fuse in (True, False)
    )
    assert len(plain) > 2 * len(fused)


@pytest.mark.parametrize(
    "kind", ["llama", "gemma2", "gemma3_text", "gpt_oss", "qwen3_moe", "deepseek_v3", "qwen3_next"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_models_replay_what_they_compute(kind, dtype):
    loaded = hf.load(small_model(kind), dtype=dtype, device="cuda")  # compares the logits
    assert "graphkit::rms_norm" in loaded.layout.replaced.values()
    report = gk.audit_target(
        loaded.target(max_batch_size=4, max_context_len=64), modes=[MODE], batch_sizes=[4]
    )
    assert [finding for finding in report.findings if finding.severity == "error"] == []


def test_loading_takes_the_memory_of_the_weights():
    model = small_model("llama")
    hf.load(model, device="cuda")  # workspaces of the products
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with torch.device("cuda"):
        config = type(model.config)(
            vocab_size=256, hidden_size=1024, intermediate_size=3584, num_hidden_layers=8,
            num_attention_heads=16, num_key_value_heads=4, dtype="bfloat16",
        )  # fmt: skip
        large = type(model)(config).to(torch.bfloat16)
    weights = torch.cuda.memory_allocated() - before
    torch.cuda.reset_peak_memory_stats()
    loaded = hf.load(large, device="cuda")
    assert loaded.layout.replaced
    assert torch.cuda.max_memory_allocated() - before <= 1.2 * weights
