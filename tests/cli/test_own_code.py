"""``--trust-remote-code``: folders with Python code for their model and tokenizer."""

from __future__ import annotations

import json

import pytest

from graphkit.errors import CheckpointError
from graphkit.records import CaptureRecord, GenerateRecord

pytest.importorskip("graphkit.models")
from transformers import AutoModelForCausalLM, dynamic_module_utils

from checkpoint_folders import greedy_ids, write_checkpoint
from graphkit import models

MODEL = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM


class OwnConfig(LlamaConfig):
    model_type = "own_model"


class OwnMLP(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.down_proj, self.up_proj = inner.down_proj, inner.up_proj

    def forward(self, hidden):
        return self.down_proj(torch.tanh(self.up_proj(hidden)))


class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp = OwnMLP(layer.mlp)
"""
TOKENIZER = """
from transformers import PreTrainedTokenizerFast


class OwnTokenizer(PreTrainedTokenizerFast):
    def __call__(self, text, **options):
        return super().__call__(text.upper(), **options)
"""
PROMPT, COUNT = "the verifier", 6


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder whose model and tokenizer are its own classes."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = tmp_path / "own"
    write_checkpoint(folder, "llama")
    (folder / "modeling_own.py").write_text(MODEL)
    (folder / "tokenization_own.py").write_text(TOKENIZER)
    classes = {"AutoConfig": "OwnConfig", "AutoModelForCausalLM": "OwnForCausalLM"}
    update(
        folder / "config.json",
        model_type="own_model",
        auto_map={name: f"modeling_own.{each}" for name, each in classes.items()},
    )
    update(
        folder / "tokenizer_config.json",
        tokenizer_class="OwnTokenizer",
        auto_map={"AutoTokenizer": [None, "tokenization_own.OwnTokenizer"]},
    )
    return folder


def update(path, **settings):
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def test_a_folder_with_code_is_refused_without_the_option(run, folder):
    for command in (("generate", "--prompt", "a"), ("capture",), ("bench",)):
        ended = run(*command, "--checkpoint", folder, "--device", "cpu")
        assert (ended.code, ended.out) == (2, "")
        assert f"error: {folder} needs Python code from its folder" in ended.err
        assert "--trust-remote-code" in ended.err
    with pytest.raises(CheckpointError, match="trust_remote_code=True"):
        models.load(folder, device="cpu")


@pytest.mark.slow
def test_the_code_of_model_and_tokenizer_runs_with_the_option(run, folder, here):
    on_cpu = ("--checkpoint", folder, "--trust-remote-code", "--device", "cpu")
    options = ("--prompt", PROMPT, "--max-new-tokens", COUNT, "--eager", "--json")
    ended = run("generate", *on_cpu, *options)
    assert (ended.code, ended.err) == (0, "")
    (completion,) = GenerateRecord.from_json(ended.out).completions

    own = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    assert type(own).__name__ == "OwnForCausalLM"
    tokenizer = models.load(folder, device="cpu", trust_remote_code=True).tokenizer
    prompt_ids = tokenizer.encode(PROMPT)
    assert tokenizer.decode(prompt_ids).endswith(PROMPT.upper())
    new_ids = greedy_ids(own, prompt_ids, COUNT)
    assert list(completion.token_ids) == new_ids

    ended = run("capture", *on_cpu, "--batch-sizes", 2, "--mode", "decode", "--out", "r.json")
    assert ended.code == 0
    assert CaptureRecord.load(here / "r.json").target == "OwnForCausalLM"
