"""``graphkit generate --checkpoint``: the text of transformers' own greedy decoding."""

from __future__ import annotations

import json
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
from graphkit.records import GenerateRecord
from small_models import small_model

hf = pytest.importorskip("graphkit.models")
PROMPT, COUNT = "The verifier reads é日", 24
PLAIN = ("--algorithm", "none", "--eager")
"""The fastest settings."""


@dataclass
class Folder:
    """A checkpoint, its head, and what transformers generates with it."""

    path: Path
    head: Path
    model: Any
    tokenizer: Any
    new_ids: list[int]
    text: str


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return ``folders(kind)``."""
    made = {}

    def make(kind):
        if kind not in made:
            path, head = tmp_path_factory.mktemp(kind), tmp_path_factory.mktemp("head")
            train = byte_fallback_tokenizer if kind == "mistral" else byte_level_tokenizer
            model = write_checkpoint(path, kind, train())
            write_eagle_head(head, path)
            tokenizer = hf.FolderTokenizer(path, model.config.vocab_size)
            prompt_ids = tokenizer.encode(PROMPT)
            new_ids = greedy_ids(model, prompt_ids, COUNT)
            text = continuation(tokenizer, prompt_ids, new_ids)
            made[kind] = Folder(path, head, model, tokenizer, new_ids, text)
        return made[kind]

    return make


@pytest.fixture
def copied(folders, tmp_path):
    """Return ``copied(kind)``: a folder that a test may change."""
    return lambda kind: shutil.copytree(folders(kind).path, tmp_path / kind)


@pytest.fixture
def recorded(run):
    """Return ``recorded(folder, argument, ...)``, which returns the record."""

    def command(folder, *arguments):
        count = () if "--max-new-tokens" in arguments else ("--max-new-tokens", COUNT)
        ended = run("generate", "--checkpoint", folder, *count, *arguments, "--json")
        assert (ended.code, ended.err.strip()) == (0, "")
        return GenerateRecord.from_json(ended.out)

    return command


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["NONE", "NGRAM", "EAGLE"])
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_text_is_that_of_transformers(folders, recorded, kind, algorithm):
    """The algorithm is chosen by --draft, except for NONE."""
    folder = folders(kind)
    options = {
        "NONE": ("--algorithm", "NONE"), "NGRAM": (), "EAGLE": ("--draft", folder.head),
    }[algorithm]  # fmt: skip
    record = recorded(folder.path, "--prompt", PROMPT, *options)
    assert record.text == folder.text
    assert (record.algorithm, record.backend) == (algorithm, "recorder")
    assert record.fallbacks == {}
    assert sum(record.replays.values()) > 0
    (completion,) = record.completions
    assert (completion.prompt, completion.tokens) == (PROMPT, COUNT)
    assert list(completion.token_ids) == folder.new_ids


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("qwen3_moe", ()),
        ("qwen3", ("--topk", "2", "--page-size", "8", "--algorithm", "eagle3")),
        ("mistral", ("--generation", "v1")),
    ],
)
def test_an_eagle3_head_is_recognised_and_lossless(folders, recorded, tmp_path, kind, options):
    folder = folders(kind)
    write_eagle3_head(tmp_path, folder.path)
    record = recorded(folder.path, "--draft", tmp_path, "--prompt", PROMPT, *options)
    assert record.text == folder.text
    assert (record.algorithm, record.fallbacks) == ("EAGLE3", {})


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ("--topk", "2", "--generation", "v2", "--page-size", "8"),
        ("--generation", "v1", "--page-size", "4"),
    ],
    ids=" ".join,
)
def test_trees_pages_and_other_generations(folders, recorded, options):
    folder = folders("mistral")
    assert recorded(folder.path, "--draft", folder.head, "--prompt", PROMPT, *options).text == (
        folder.text
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [("--top-k", "1"), ("--top-p", "1e-6"), ("--min-p", "1")], ids=" ".join
)
def test_a_filter_that_keeps_one_token_is_greedy(folders, recorded, options):
    folder = folders("qwen3")
    record = recorded(folder.path, *PLAIN, "--prompt", PROMPT, "--temperature", "5", *options)
    assert record.text == folder.text
    assert getattr(record, options[0].strip("-").replace("-", "_")) == float(options[1])
    free = recorded(folder.path, *PLAIN, "--prompt", PROMPT, "--temperature", "5")
    assert free.text != folder.text


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [("--repetition-penalty", "1.5"), ("--presence-penalty", "2"), ("--frequency-penalty", "1.5")],
    ids=" ".join,
)
def test_a_penalty_changes_the_text_and_is_recorded(folders, recorded, options):
    folder = folders("qwen3")
    record = recorded(folder.path, *PLAIN, "--prompt", PROMPT, *options)
    assert record.text != folder.text
    assert getattr(record, options[0].strip("-").replace("-", "_")) == float(options[1])


@pytest.mark.parametrize("name", ["generation_config.json", "config.json"])
def test_the_stop_tokens_are_those_of_the_folder(folders, copied, recorded, name):
    folder, path = folders("qwen3"), copied("qwen3")
    token = folder.new_ids[9]
    end = folder.new_ids.index(token)
    (path / "generation_config.json").write_text("{}")
    config = json.loads((path / name).read_text())
    (path / name).write_text(json.dumps(config | {"eos_token_id": [token, 2]}))
    (completion,) = recorded(path, *PLAIN, "--prompt", PROMPT).completions
    assert (completion.finish_reason, completion.tokens) == ("stop token", end + 1)
    ids = folder.tokenizer.encode(PROMPT)
    assert completion.text == continuation(folder.tokenizer, ids, folder.new_ids[:end])


def test_the_settings_of_generation_are_those_of_the_folder(folders, copied, run):
    folder, path = folders("qwen3"), copied("qwen3")
    settings = {"repetition_penalty": 1.4, "eos_token_id": None, "no_repeat_ngram_size": 90}
    (path / "generation_config.json").write_text(json.dumps(settings))
    ids = folder.tokenizer.encode(PROMPT)
    expected = folder.model.generate(
        torch.tensor([ids]), max_new_tokens=COUNT, do_sample=False, repetition_penalty=1.4,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    options = ("--prompt", PROMPT, "--max-new-tokens", COUNT, "--json")
    ended = run("generate", "--checkpoint", path, *PLAIN, *options)
    (completion,) = GenerateRecord.from_json(ended.out).completions
    assert list(completion.token_ids) == expected[0, len(ids) :].tolist()
    assert list(completion.token_ids) != folder.new_ids


@pytest.mark.slow
@pytest.mark.parametrize("generation", ["v1", "v2", "v3"])
def test_a_stop_string_ends_the_text_before_it(folders, recorded, generation):
    folder = folders("mistral")
    stop = folder.text[7:12]
    record = recorded(
        folder.path, "--draft", folder.head, "--prompt", PROMPT, "--stop", stop, "--stop", "zzz",
        "--generation", generation, "--eager",
    )  # fmt: skip
    assert record.text == folder.text[: folder.text.index(stop)]
    (completion,) = record.completions
    assert completion.finish_reason == "stop string"
    assert completion.tokens < COUNT, "the request was aborted"


def test_a_chat_is_rendered_and_encoded_as_by_transformers(folders, recorded):
    import transformers

    folder = folders("qwen3")
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder.path)
    ids = theirs.apply_chat_template(
        [{"role": "user", "content": "hi é"}], add_generation_prompt=True, return_dict=False
    )
    assert folder.tokenizer.encode_chat([{"role": "user", "content": "hi é"}]) == ids
    assert folder.tokenizer.encode(PROMPT) == theirs(PROMPT)["input_ids"]
    record = recorded(folder.path, *PLAIN, "--chat", "--prompt", "hi é")
    new_ids = greedy_ids(folder.model, ids, COUNT)
    assert record.text == continuation(folder.tokenizer, ids, new_ids)
    assert (record.is_chat, record.completions[0].prompt) == (True, "hi é")


@pytest.mark.slow
@pytest.mark.parametrize("is_json", [False, True])
def test_a_file_of_prompts(folders, recorded, tmp_path, is_json):
    folder = folders("qwen3")
    lines = [json.dumps({"prompt": each}) if is_json else each for each in ("class A", PROMPT)]
    (tmp_path / "prompts").write_text("\n".join(lines) + "\n", encoding="utf-8")
    record = recorded(folder.path, *PLAIN, "--prompts", tmp_path / "prompts", "--prompt", "x")
    assert [each.prompt for each in record.completions] == ["x", "class A", PROMPT]
    assert record.completions[2].text == folder.text


def test_lines_of_json_have_results_of_their_own_as_they_end(folders, run, tmp_path):
    folder = folders("qwen3")
    chat = [{"role": "user", "content": "hi"}]
    lines = [
        {"prompt": PROMPT, "id": "whole"},
        {"prompt": PROMPT, "id": 2, "max_new_tokens": 3, "logit_bias": {"5": -1}, "logprobs": True},
        {"prompt": PROMPT, "stop": folder.text[4:6]},
        {"messages": chat, "max_new_tokens": 1},
    ]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    arguments = ("--checkpoint", folder.path, "--prompts", tmp_path / "prompts.jsonl")
    ended = run("generate", *PLAIN, *arguments, "--max-new-tokens", COUNT)
    results = {result["id"]: result for result in map(json.loads, ended.out.splitlines())}
    assert [*results][-1] == "whole", "the longest ends last"
    assert results["whole"]["text"] == folder.text
    assert results[2]["tokens"] == len(results[2]["token_ids"]) == 3
    assert len(results[2]["logprobs"]) == 3
    assert max(results[2]["logprobs"]) < 0
    assert results["whole"]["logprobs"] == []
    assert results[3]["text"] == folder.text[: folder.text.index(folder.text[4:6])]
    assert results[3]["finish_reason"] == "stop string"
    ids = folder.tokenizer.encode_chat(chat)
    assert results[4]["token_ids"] == greedy_ids(folder.model, ids, 1)
    assert all(0 < r["time_to_first_token"] <= r["latency"] for r in results.values())
    assert "tokens/s" in ended.err


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ({"temprature": 1}, "line 1 of .* has the key 'temprature'"),
        ({"temperature": -1}, r"line 1 of .*: SamplingParams.temperature must be"),
        ({"logit_bias": {"a": 1}}, r"line 1 of .*: SamplingParams.logit_bias has the key 'a'"),
    ],
)
def test_a_setting_of_a_line_that_cannot_be_used_is_named(run, tmp_path, line, reason):
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "a", **line}))
    ended = run("generate", "--device", "cpu", "--prompts", tmp_path / "prompts.jsonl")
    assert ended.code == 2
    assert re.search(reason, " ".join(ended.err.split()))


@pytest.mark.slow
def test_a_terminal_gets_the_text_as_it_is_generated(folders, run, monkeypatch):
    written, folder = [], folders("mistral")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(sys.stdout, "write", written.append)
    arguments = ("--checkpoint", folder.path, "--prompt", PROMPT, "--max-new-tokens", COUNT)
    assert run("generate", *PLAIN, *arguments).code == 0
    assert "".join(written[1:]) == f"{folder.text}\n"
    assert len(written) > 10


@pytest.mark.slow
def test_the_context_ends_at_the_limit(folders, recorded):
    folder = folders("qwen3")
    record = recorded(folder.path, *PLAIN, "--prompt", PROMPT, "--max-context-len", "30")
    (completion,) = record.completions
    assert completion.finish_reason == "context limit"
    assert folder.text.startswith(completion.text[:-1])
    assert 0 < completion.tokens < 30 - len(folder.tokenizer.encode(PROMPT))


def change(name, **values):
    """Return a change of a JSON file, in which ``None`` deletes."""

    def apply(folder):
        body = json.loads((folder / name).read_text()) | values
        kept = {key: value for key, value in body.items() if value is not None}
        (folder / name).write_text(json.dumps(kept))

    return apply


def delete(*names):
    return lambda folder: [(folder / name).unlink() for name in names]


def write(name, text):
    return lambda folder: (folder / name).write_bytes(text)


def cut_a_shard(folder):
    shard = max(folder.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-100])


def delete_weights(folder):
    for file in folder.glob("*.safetensors*"):
        file.unlink()


def shrink_vocabulary(folder):
    delete_weights(folder)
    small_model("qwen3", vocab_size=100).save_pretrained(folder)


def delete_a_shard(folder):
    max(folder.glob("*.safetensors")).unlink()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("damage", "options", "text"),
    [
        (delete("tokenizer.json"), (), "cannot be loaded by transformers"),
        (delete("tokenizer.json", "tokenizer_config.json"), (), "contains no tokenizer: none of "),
        (write("tokenizer.json", b"{"), (), "tokenizer of"),
        (write("tokenizer.json", b"\xff"), (), "UnicodeDecodeError"),
        (change("config.json", vocab_size=400), (), "but config.json requires [400, 64]"),
        (change("config.json", hidden_size="x"), (), "expected int, got str"),
        (change("config.json", model_type="none"), (), "model type `none`"),
        (change("config.json", model_type="bert"), (), "bert"),
        (
            change("config.json", num_hidden_layers=3, layer_types=None),
            (),
            "has no model.layers.2.",
        ),
        (change("config.json", eos_token_id="</s>"), (), "eos_token_id"),
        (write("config.json", b"{"), (), "is not valid JSON"),
        (write("config.json", b"[]"), (), "must contain a JSON object"),
        (change("config.json", dtype="float99"), (), "error: config.json of"),
        (delete("config.json"), (), "has no config.json"),
        (cut_a_shard, (), "is not a valid safetensors file"),
        (delete_a_shard, (), "contains no model-"),
        (delete_weights, (), "contains none of model.safetensors"),
        (delete("chat_template.jinja"), ("--chat",), "cannot make a chat of the messages"),
        (write("chat_template.jinja", b"{% if %}"), ("--chat",), "TemplateSyntaxError"),
        (write("chat_template.jinja", b"{{ 1 // 0 }}"), ("--chat",), "ZeroDivisionError"),
        (write("chat_template.jinja", b"\xff"), ("--chat",), "UnicodeDecodeError"),
        (lambda folder: None, ("--prompt", "\udcff"), "not valid UTF-8 at position 0"),
        (lambda folder: None, ("--prompt", "x " * 100), "but prompt and output together are"),
        (change("tokenizer.json", post_processor=None), ("--prompt", ""), "the prompt is empty"),
        (shrink_vocabulary, ("--prompt", "🙂"), "but the vocabulary has 100 tokens"),
    ],
)
def test_a_bad_folder_or_prompt_is_refused_on_one_line(run, copied, damage, options, text):
    folder = copied("qwen3")
    (folder / "generation_config.json").unlink()
    damage(folder)
    prompt = () if "--prompt" in options else ("--prompt", "x")
    ended = run("generate", "--checkpoint", folder, *prompt, *options)
    assert (ended.code, ended.out) == (2, "")
    assert text in ended.error


@pytest.mark.parametrize(
    "command", [("capture",), ("audit",), ("inspect",), ("bench",), ("generate", "--prompt", "x")]
)
def test_transformers_is_named_if_it_is_missing(run, folders, monkeypatch, command):
    path = folders("qwen3").path
    monkeypatch.setitem(sys.modules, "graphkit.models", None)
    ended = run(*command, "--checkpoint", path)
    assert (ended.code, ended.out) == (2, "")
    assert ended.error.startswith("error: models cannot be loaded: import of graphkit.models")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"hidden_size": 16}, "the draft head has hidden_size 16, but its target has 64"),
        ({"vocab_size": 100}, "the draft head has vocab_size 100, but its target has 320"),
        ({"num_hidden_layers": 2}, "must have num_hidden_layers 1, got 2"),
        ({"model_type": "gemma3"}, "has model_type 'gemma3'"),
    ],
)
def test_a_head_of_another_model_is_refused(run, folders, tmp_path, change, text):
    folder = folders("qwen3")
    head = shutil.copytree(folder.head, tmp_path / "head")
    body = json.loads((head / "config.json").read_text())
    (head / "config.json").write_text(json.dumps(body | change))
    ended = run("generate", "--checkpoint", folder.path, "--draft", head, "--prompt", "x")
    assert (ended.code, ended.out) == (2, "")
    assert text in ended.error


@pytest.mark.parametrize(
    ("algorithm", "text"),
    [("EAGLE", "use one of EAGLE3, NGRAM, NONE"), ("EAGLE3", "use one of EAGLE, NGRAM, NONE")],
)
def test_a_head_of_the_other_algorithm_is_refused(run, folders, tmp_path, algorithm, text):
    folder = folders("qwen3")
    write_eagle3_head(tmp_path, folder.path)
    head = tmp_path if algorithm == "EAGLE" else folder.head
    ended = run(
        "generate", "--checkpoint", folder.path, "--draft", head, "--prompt", "x",
        "--algorithm", algorithm,
    )  # fmt: skip
    assert (ended.code, ended.out) == (2, "")
    assert text in ended.error
