"""``--checkpoint`` of capture, inspect, audit and bench: folders of three kinds of models."""

from __future__ import annotations

import shutil
from importlib import import_module

import pytest
import torch
from safetensors.torch import load_file, save_file

from graphkit.records import AuditReport, BenchReport, CaptureRecord, GenerateRecord

pytest.importorskip("graphkit.models")

from checkpoint_folders import (
    byte_level_tokenizer,
    write_checkpoint,
    write_eagle_head,
    write_tokenizer,
)
from mtp_folders import save_with_mtp
from small_models import small_model

KINDS = {"qwen3": "self_attn", "qwen3_moe": "mlp.experts", "qwen3_next": "linear_attn"}
"""A module of the first layer by kind: dense, with experts, and with recurrent layers."""
ONE = ("--batch-sizes", 2)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return ``folders(kind)``."""
    made = {}

    def make(kind):
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp(kind)
            write_checkpoint(made[kind], kind)
        return made[kind]

    return make


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_capture_compares_every_replay_and_the_model(run, folders, here, kind):
    ended = run("capture", "--checkpoint", folders(kind), *ONE, "--out", "record.json")
    assert (ended.code, ended.messages) == (0, ["wrote record.json"])
    assert "rows compared with the model" in " ".join(ended.out.split())
    record = CaptureRecord.load(here / "record.json")
    assert [mode.mode for mode in record.modes] == ["TARGET_VERIFY", "DECODE", "STEP"]
    assert [size.batch_size for size in record.modes[0].sizes] == [2]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_modules_are_named_as_in_the_folder(run, folders, kind):
    ended = run(
        "inspect", "--checkpoint", folders(kind), *ONE, "--mode", "target_verify", "--json",
        "--dtype", "bfloat16", "--topk", 2, "--num-draft-tokens", 6,
    )  # fmt: skip
    assert (ended.code, ended.messages) == (0, [])
    record = CaptureRecord.from_json(ended.out)
    (mode,) = record.modes
    assert mode.tokens_per_request == 6
    modules = {node.module for graph in record.graphs for node in graph.nodes}
    assert f"model.layers.0.{KINDS[kind]}" in modules
    assert "lm_head" in modules


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_sound_model_has_no_error(run, folders, kind):
    ended = run("audit", "--checkpoint", folders(kind), *ONE, "--json")
    assert (ended.code, ended.messages) == (0, [])
    report = AuditReport.from_json(ended.out)
    assert {finding.severity for finding in report.findings} <= {"note"}


def test_a_changed_model_has_an_error(run, folders, here, monkeypatch):
    """The audit does not pass by looking at nothing: here every window of a model is dropped."""
    from graphkit.models.pools import LayerGroupAttention

    write_checkpoint(here / "mistral", "mistral")
    attend = LayerGroupAttention.attend

    def without_window(self, layer, call, *others):
        object.__setattr__(call, "window", 0)
        return attend(self, layer, call, *others)

    monkeypatch.setattr(import_module("graphkit.models.loader"), "check_loaded", lambda *_: None)
    monkeypatch.setattr(LayerGroupAttention, "attend", without_window)
    ended = run("audit", "--checkpoint", here / "mistral", *ONE, "--only", "wrapper")
    assert ended.code == 1
    assert "wrapper differs from model" in ended.out


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_steps_of_a_folder_are_measured(run, folders, kind):
    ended = run(
        "bench", "--checkpoint", folders(kind), *ONE, "--steps", 1, "--rounds", 1, "--context", 4,
        "--generations", "v2", "--json",
    )  # fmt: skip
    assert ended.code == 0, ended.err
    report = BenchReport.from_json(ended.out)
    assert report.name == f"steps of {folders(kind).name}"
    assert (report.settings["algorithm"], report.settings["dtype"]) == ("NGRAM", "float32")
    measured = [measure.name for measure in report.measures]
    assert "weights read by verify" in measured


@pytest.mark.slow
def test_a_draft_head_adds_its_modes(run, folders, here):
    folder = folders("qwen3_moe")
    write_eagle_head(here / "head", folder)
    ended = run("capture", "--checkpoint", folder, "--draft", "head", *ONE, "--json")
    assert (ended.code, ended.messages) == (0, [])
    modes = [mode.mode for mode in CaptureRecord.from_json(ended.out).modes]
    assert {"TARGET_VERIFY", "DECODE", "DRAFT", "DRAFT_EXTEND", "STEP"} <= set(modes)


@pytest.mark.slow
@pytest.mark.parametrize(("count", "algorithm"), [(1, "EAGLE"), (2, "MULTI_LAYER_EAGLE")])
def test_mtp_layers_in_the_folder_draft(run, here, count, algorithm):
    """The text is that of plain decoding."""
    save_with_mtp(small_model("deepseek_v3", vocab_size=320), here / "target", 1, count=count)
    write_tokenizer(here / "target", byte_level_tokenizer())
    generate = ("generate", "--checkpoint", "target", "--prompt", "The drafts", "--json")
    texts = {}
    for options in (("--draft", "mtp"), ("--algorithm", "none")):
        ended = run(*generate, *options, "--max-new-tokens", 12)
        assert (ended.code, ended.messages) == (0, [])
        record = GenerateRecord.from_json(ended.out)
        texts[record.algorithm] = record.completions[0].token_ids
    assert list(texts) == [algorithm, "NONE"]
    assert texts[algorithm] == texts["NONE"]


def test_a_setting_that_the_model_refuses_is_one_line(run, folders):
    ended = run("capture", "--checkpoint", folders("qwen3"), "--max-context-len", 999)
    assert (ended.code, ended.out) == (2, "")
    assert "max_context_len is 999, but the model has 128 positions" in ended.error
    ended = run("capture", "--checkpoint", folders("qwen3"), "--algorithm", "eagle")
    assert (ended.code, ended.out) == (2, "")
    assert "EAGLE needs a draft model" in ended.error


@pytest.mark.parametrize("command", [("capture",), ("generate", "--prompt", "a")])
def test_a_tensor_that_the_model_does_not_have_is_refused(run, folders, here, command):
    shutil.copytree(folders("qwen3"), here / "copy")
    name = "model.layers.0.self_attn.q_proj.bias"
    file = min((here / "copy").glob("*.safetensors"))
    save_file(load_file(file) | {name: torch.ones(64)}, file)
    ended = run(*command, "--checkpoint", "copy")
    assert (ended.code, ended.out) == (2, "")
    assert name in ended.error


def test_a_draft_that_does_not_fit_is_one_line(run, folders, here):
    shutil.copytree(folders("qwen3"), here / "copy")
    for draft, text in (("copy/none", "none"), ("mtp", "mtp")):
        ended = run("capture", "--checkpoint", "copy", "--draft", draft)
        assert (ended.code, ended.out) == (2, "")
        assert text in ended.error


@pytest.mark.slow
@pytest.mark.parametrize("quantize", ["fp8", "int4"])
def test_weights_are_quantised_at_load(run, folders, here, quantize):
    options = ("--checkpoint", folders("qwen3"), *ONE, "--quantize", quantize)
    ended = run("capture", *options, "--mode", "target_verify", "--out", "record.json")
    assert (ended.code, ended.messages) == (0, ["wrote record.json"])
    record = (here / "record.json").read_text()
    assert "quantized_linear" in record


@pytest.mark.slow
def test_the_reference_model_is_quantised_and_a_target_is_not(run):
    options = ("--mode", "decode", "--batch-sizes", 1, "--quantize", "fp8")
    ended = run("inspect", *options, "--json")
    assert ended.code == 0
    assert "quantized_linear" in ended.out
    ended = run("capture", "graphkit.models.reference:eagle3_target", *options)
    assert ended.code == 2
    assert "--quantize applies to a --checkpoint: a TARGET has its own settings." in ended.err


@pytest.mark.slow
def test_keys_and_values_are_stored_in_fp8(run, folders):
    options = ("--checkpoint", folders("qwen3"), *ONE, "--kv-dtype", "fp8")
    ended = run("capture", *options)
    assert ended.code == 0
    assert "rows compared with the model" not in " ".join(ended.out.split())
    ended = run("generate", "--kv-dtype", "fp8", "--prompt", "def", "--max-new-tokens", 4)
    assert ended.code == 0
    ended = run("capture", "--kv-dtype", "fp8")
    assert (ended.code, "--kv-dtype applies to a --checkpoint" in ended.err) == (2, True)


@pytest.mark.slow
@pytest.mark.parametrize(("small", "threads"), [(64 << 20, 1), (0, 2)])
def test_a_small_model_computes_with_one_thread(run, folders, monkeypatch, small, threads):
    monkeypatch.setattr("graphkit.cli.models._SMALL_WEIGHTS", small)
    torch.set_num_threads(2)
    try:
        ended = run("capture", "--checkpoint", folders("qwen3"), *ONE, "--mode", "decode")
        assert (ended.code, torch.get_num_threads()) == (0, threads)
    finally:
        torch.set_num_threads(1)
