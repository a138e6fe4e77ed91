"""tools/train_reference.py on a few files, for a few steps."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoConfig

from graphkit import models
from graphkit.models.reference import default_checkpoint
from graphkit.models.tokenizer import decode

MODELS = ("target", "eagle", "eagle3", "dflash", "mtp", "standalone")


@pytest.fixture
def source(tmp_path):
    """A source folder with e.py on the held-out side, and files that must not be read."""
    for name in ("a.py", "b.py", "pkg/c.py", "e.py"):
        path = tmp_path / "source" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# {name}\n" + "def f(x):\n    return x + 1\n" * 30)
    for name in ("test/t.py", "site-packages/s.py", "notes.txt"):
        path = tmp_path / "source" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("UNWANTED" * 100)
    return tmp_path / "source"


@pytest.fixture
def run(tool, source):
    """Return a function that trains into a folder for so many steps."""

    def train(out, *arguments):
        options = ["--source", str(source), "--out", str(out), "--device", "cpu"]
        assert tool.main([*options, "--batch", "1", *arguments]) == 0
        return out

    return train


def results_of(folder):
    return json.loads((folder / "training.json").read_text())


def test_the_split_is_by_name_and_in_order(training, source):
    read, is_held_out = training.corpus.read_corpus, training.corpus.is_held_out
    learn = decode(read(source, held_out=False).tolist())
    held_out = decode(read(source, held_out=True).tolist())
    assert [part.split("\n")[0] for part in learn.split("\0")] == [
        "# a.py",
        "# b.py",
        "# pkg/c.py",
        "",
    ]
    assert held_out.startswith("# e.py")
    assert "UNWANTED" not in learn + held_out
    share = sum(is_held_out(f"{number}.py") for number in range(2000)) / 2000
    assert 0.03 < share < 0.07


def test_too_little_source(training, tmp_path):
    with pytest.raises(SystemExit, match="bytes of held-out source"):
        training.corpus.read_corpus(tmp_path, held_out=True)


@pytest.mark.slow
def test_the_target_alone(run, training, tmp_path, capsys):
    out = run(tmp_path, "--steps", "3", "--batch", "2", "--seed", "5")
    results = results_of(out / "target")
    assert results["steps"] == 3
    assert results["tokens"] == 3 * 2 * 512
    assert results["seed"] == 5
    assert results["torch"] == torch.__version__
    assert 2 < results["held_out_bits_per_byte"] < 7.9, "untrained is 8"
    captured = capsys.readouterr()
    last = captured.out.splitlines()[-1]
    bits = results["held_out_bits_per_byte"]
    assert last.startswith(f"target: held_out_bits_per_byte {bits}, seed 5")
    assert "step 3/3 loss" in captured.err
    assert AutoConfig.from_pretrained(out / "target").num_hidden_layers == 4
    assert (out / "target" / "model.safetensors").stat().st_size < 7_000_000


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("eagle", 1_800_000),
        ("eagle3", 2_200_000),
        ("dflash", 3_600_000),
        ("mtp", 5_400_000),
        ("standalone", 900_000),
    ],
)
def test_a_draft_model_for_the_shipped_target(name, size, run, training, tmp_path, capsys):
    folder = run(tmp_path, "--model", name, "--steps", "2") / name
    assert [path.name for path in tmp_path.iterdir() if path.name in MODELS] == [name]
    results = results_of(folder)
    assert len(results["accept_rates"]) == (7 if name == "dflash" else 3)
    expected = training.losses.accept_length(results["accept_rates"][:3])
    assert results["accept_length"] == pytest.approx(expected, abs=0.005)
    assert 1 <= results["accept_length"] <= 4
    assert "accept_rates [" in capsys.readouterr().out
    assert models.load(default_checkpoint(), draft=folder, device="cpu", check=False).draft
    assert 0.9 * size < (folder / "model.safetensors").stat().st_size < size
    dtypes = json.loads((folder / "config.json").read_text())["dtype"]
    assert dtypes == "bfloat16"


@pytest.mark.slow
def test_all_models_draft_for_the_new_target(run, tool, tmp_path, monkeypatch):
    calls = []
    train_model = tool.train_model

    def spy(name, target, *rest):
        calls.append((name, target))
        return train_model(name, target, *rest)

    monkeypatch.setattr(tool, "train_model", spy)
    run(tmp_path, "--model", "all", "--steps", "1")
    new = tmp_path / "target"
    assert calls == [("target", None), *((name, new) for name in MODELS[1:])]
    assert all((tmp_path / name / "training.json").is_file() for name in MODELS)


@pytest.mark.slow
def test_saved_weights_are_measured_again(run, tmp_path, capsys):
    folder = run(tmp_path, "--model", "eagle3", "--steps", "1") / "eagle3"
    results, weights = results_of(folder), (folder / "model.safetensors").read_bytes()
    capsys.readouterr()
    run(tmp_path, "--model", "eagle3", "--measure")
    keys = ("accept_rates", "accept_length")
    line = ", ".join(f"{key} {results[key]}" for key in keys)
    assert capsys.readouterr().out == f"eagle3: {line}\n"
    assert (folder / "model.safetensors").read_bytes() == weights


@pytest.mark.slow
@pytest.mark.parametrize("name", ["target", "eagle"])
def test_a_run_repeats(name, run, tmp_path):
    folders = [run(tmp_path / n, "--model", name, "--steps", "2") / name for n in ("one", "two")]
    first, second = ((folder / "model.safetensors").read_bytes() for folder in folders)
    assert first == second


@pytest.mark.parametrize("option", ["--steps", "--batch", "--limit-seconds"])
def test_nothing_to_do_is_refused(tool, option, capsys):
    with pytest.raises(SystemExit) as caught:
        tool.main([option, "0"])
    assert caught.value.code == 2
    assert "must be above 0" in capsys.readouterr().err
