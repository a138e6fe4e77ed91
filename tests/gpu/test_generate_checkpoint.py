"""``graphkit generate --checkpoint`` on CUDA: the text of transformers' own greedy decoding."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch

from checkpoint_folders import (
    KINDS,
    byte_fallback_tokenizer,
    byte_level_tokenizer,
    continuation,
    greedy_ids,
    write_checkpoint,
    write_eagle3_head,
    write_eagle_head,
)
from graphkit.cli import main
from graphkit.records import GenerateRecord

hf = pytest.importorskip("graphkit.models")
pytestmark = pytest.mark.gpu
PROMPT, COUNT = "The verifier reads é日", 24


@pytest.fixture
def recorded(capsys):
    """Return ``recorded(argument, ...)``, which returns the record."""

    def command(*arguments):
        capsys.readouterr()
        arguments = ("--device", "cuda", "--max-new-tokens", COUNT, "--json", *arguments)
        code = main(["generate", *(str(argument) for argument in arguments)])
        out, err = capsys.readouterr()
        assert code == 0, err
        return GenerateRecord.from_json(out)

    return command


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_text_is_that_of_transformers(recorded, tmp_path, kind):
    """In float32, the data type of the folder."""
    target, head = tmp_path / "target", tmp_path / "head"
    train = byte_fallback_tokenizer if kind == "mistral" else byte_level_tokenizer
    model = write_checkpoint(target, kind, train()).to("cuda")
    write_eagle_head(head, target)
    write_eagle3_head(tmp_path / "head3", target)
    tokenizer = hf.FolderTokenizer(target, model.config.vocab_size)
    prompt_ids = tokenizer.encode(PROMPT)
    text = continuation(tokenizer, prompt_ids, greedy_ids(model, prompt_ids, COUNT))
    eagle3 = ("--draft", tmp_path / "head3")
    for options in (
        ("--algorithm", "NONE"), ("--algorithm", "NGRAM"), ("--draft", head), eagle3,
        (*eagle3, "--topk", "2", "--page-size", "16"), (*eagle3, "--generation", "v2"),
    ):  # fmt: skip
        record = recorded("--checkpoint", target, "--prompt", PROMPT, *options)
        assert record.text == text, options
        assert record.backend == "cuda"
        assert record.fallbacks == {}
    stop = text[8:12]
    options = ("--draft", head, "--topk", "2", "--page-size", "16", "--stop", stop)
    record = recorded("--checkpoint", target, "--prompt", PROMPT, *options)
    assert record.text == text[: text.index(stop)]
    assert record.completions[0].finish_reason == "stop string"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_folder_runs_in_its_data_type(recorded, tmp_path, dtype, monkeypatch):
    model = write_checkpoint(tmp_path, "llama")
    model.to(dtype).save_pretrained(tmp_path / "half")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "half" / name).write_bytes((tmp_path / name).read_bytes())
    loaded, load = [], hf.load

    def noting(*arguments, **options):
        loaded.append(load(*arguments, **options))
        return loaded[-1]

    monkeypatch.setattr(import_module("graphkit.models"), "load", noting)
    record = recorded("--checkpoint", tmp_path / "half", "--prompt", PROMPT)
    assert [model.dtype for model in loaded] == [dtype]
    assert 0 < record.new_tokens <= COUNT
    assert record.fallbacks == {}
