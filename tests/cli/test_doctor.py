"""``graphkit doctor``: libraries, devices and backends, and a remedy for what does not work."""

from __future__ import annotations

import json
from importlib import import_module

import pytest
import torch


@pytest.fixture
def with_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "Imaginary [H200]")


def facts_of(run):
    ended = run("doctor", "--json")
    assert ended.code == 0
    return {fact["what"]: fact for fact in json.loads(ended.out)}


def test_json_has_the_same_keys_everywhere(run):
    for fact in facts_of(run).values():
        assert set(fact) == {"what", "found", "works", "remedy"}
        assert isinstance(fact["works"], bool)
        assert fact["works"] or fact["remedy"]


def test_without_cuda_the_recorder_works_and_the_rest_has_a_remedy(run):
    found = facts_of(run)
    assert found["torch"]["found"] == torch.__version__
    assert found["recorder backend"]["works"]
    assert not found["CUDA device"]["works"]
    assert not found["cuda backend"]["works"]
    ended = run("doctor")
    assert (ended.code, ended.err) == (0, "")
    assert torch.__version__ in ended.out
    assert "CUDA device: optional: device='cpu'" in ended.out
    assert "cuda backend: needs a CUDA device and Triton" in ended.out


def test_with_cuda_the_device_is_named(run, with_cuda):
    found = facts_of(run)
    assert found["CUDA device"] == {
        "what": "CUDA device", "found": "Imaginary [H200]", "works": True,
        "remedy": found["CUDA device"]["remedy"],
    }  # fmt: skip
    assert "Imaginary [H200]" in run("doctor").out, "brackets must not be parsed as markup"


def test_with_cuda_it_says_which_streams_slow_replays(run, with_cuda):
    streams = facts_of(run)["streams"]
    assert streams["works"]
    assert streams["found"].startswith("run eager steps on one stream")


def test_device_loops_need_the_cuda_backend_and_cuda_bindings(run, monkeypatch):
    assert "need the cuda backend" in facts_of(run)["device loops"]["remedy"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "Imaginary H200")
    monkeypatch.setattr(
        import_module("graphkit.graphs.devices"), "package_version", lambda name: "3.6"
    )
    for bindings, remedy in ((None, "install graphkit-cuda[cuda]"), (object(), "")):
        monkeypatch.setattr(
            import_module("graphkit.graphs.cuda_loop"), "runtime", lambda found=bindings: found
        )
        loops = facts_of(run)["device loops"]
        assert loops["works"] is (not remedy)
        assert loops["remedy"].endswith(remedy)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_each_fact_is_one_line_in_a_pipe(run, request, device):
    if device == "cuda":
        request.getfixturevalue("with_cuda")
    lines = run("doctor").out.splitlines()
    marks = [line.split()[0] for line in lines[: len(facts_of(run))]]
    assert set(marks) == {"ok", "--"}


def test_it_runs_without_cuda_bindings_and_triton(run, monkeypatch):
    monkeypatch.setattr(import_module("graphkit.graphs.driver"), "runtime", lambda: None)
    monkeypatch.setattr(
        import_module("graphkit.graphs.devices"), "package_version", lambda name: ""
    )
    found = facts_of(run)
    assert found["triton"]["found"] == found["cuda-bindings"]["found"] == ""
    assert not found["triton"]["works"]
    assert "missing" in run("doctor").out
