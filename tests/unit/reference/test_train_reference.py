"""tools/train_reference.py, on a few files and for a few steps."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path

import pytest
import torch

from graphkit.reference import decode, full_logits, initialise, load_checkpoint

SCRIPT = Path(__file__).parents[3] / "tools" / "train_reference.py"


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("train_reference", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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


def test_the_split_is_by_name_and_in_order(tool, source):
    learn = decode(tool.read_corpus(source, held_out=False).tolist())
    held_out = decode(tool.read_corpus(source, held_out=True).tolist())
    assert [part.split("\n")[0] for part in learn.split("\0")] == [
        "# a.py",
        "# b.py",
        "# pkg/c.py",
        "",
    ]
    assert held_out.startswith("# e.py")
    assert "UNWANTED" not in learn + held_out
    share = sum(tool.is_held_out(f"{number}.py") for number in range(2000)) / 2000
    assert 0.03 < share < 0.07


def test_too_little_source(tool, tmp_path):
    with pytest.raises(SystemExit, match="too little source"):
        tool.read_corpus(tmp_path, held_out=True)


def test_windows_are_runs_of_the_corpus_and_follow_the_seed(tool):
    corpus = torch.arange(700).remainder(251).to(torch.uint8)
    first, second = (next(tool.random_windows(corpus, 64, seed)) for seed in (3, 4))
    assert first.shape == (64, 513)
    assert torch.equal((first[:, 1:] - first[:, :-1]) % 251, torch.ones(64, 512).long())
    assert torch.equal(first, next(tool.random_windows(corpus, 64, 3)))
    assert not torch.equal(first, second)


def test_the_rate_rises_then_falls(tool):
    rates = [tool.learning_rate(step / 100) for step in range(101)]
    assert rates[0] == 0
    assert max(rates) == pytest.approx(tool.PEAK_RATE)
    assert rates.index(max(rates)) == 3
    assert rates[3:] == sorted(rates[3:], reverse=True)
    assert rates[-1] == pytest.approx(tool.PEAK_RATE / 20)


def test_loss_and_bits_agree_with_their_definition(tool):
    torch.manual_seed(0)
    model = tool.LlamaModel(tool.CONFIG)
    initialise(model, 4)
    corpus = torch.randint(256, (3 * 512 + 1,), dtype=torch.uint8)
    windows = tool.windows_at(corpus, torch.tensor([0, 512, 1024]))
    log_probs = full_logits(model, windows[:, :-1]).log_softmax(-1)
    nats = -log_probs.gather(-1, windows[:, 1:, None]).mean().item()
    assert tool.next_token_loss(model, windows).item() == pytest.approx(nats, rel=1e-5)
    bits = tool.held_out_bits(model, corpus, 2)
    assert bits == pytest.approx(nats / math.log(2), rel=1e-5)


def test_optimise_lowers_a_loss_and_heeds_the_limit(tool):
    weight = torch.nn.Parameter(torch.ones(4))

    def next_loss():
        assert weight.grad is None, "gradients of the last step are gone"
        return weight.square().sum()

    assert tool.optimise([weight], next_loss, 100, math.inf) == 100
    assert weight.abs().max().item() < 0.9
    assert tool.optimise([weight], next_loss, 10**9, 0.05) < 10**9


def test_three_steps(tool, source, tmp_path, capsys):
    out = tmp_path / "out"
    arguments = ["--source", str(source), "--out", str(out), "--device", "cpu"]
    assert tool.main([*arguments, "--steps", "3", "--batch", "2", "--seed", "5"]) == 0
    facts = json.loads((out / "training.json").read_text())
    assert facts["steps"] == 3
    assert facts["tokens"] == 3 * 2 * 512
    assert facts["seed"] == 5
    assert facts["torch"] == torch.__version__
    assert 2 < facts["held_out_bits_per_byte"] < 7.9, "untrained is 8"
    captured = capsys.readouterr()
    last = captured.out.splitlines()[-1]
    assert last.startswith(f"held_out_bits_per_byte {facts['held_out_bits_per_byte']}, seed 5")
    assert "step 3/3 loss" in captured.err
    assert load_checkpoint(out).config == tool.CONFIG
    assert (out / "model.safetensors").stat().st_size < 7_000_000


def test_a_run_repeats(tool, source, tmp_path):
    states = []
    for name in ("one", "two"):
        arguments = ["--source", str(source), "--out", str(tmp_path / name), "--device", "cpu"]
        tool.main([*arguments, "--steps", "2", "--batch", "1"])
        states.append((tmp_path / name / "model.safetensors").read_bytes())
    assert states[0] == states[1]


@pytest.mark.parametrize("option", ["--steps", "--batch", "--limit-seconds"])
def test_nothing_to_do_is_refused(tool, option, capsys):
    with pytest.raises(SystemExit) as caught:
        tool.main([option, "0"])
    assert caught.value.code == 2
    assert "must be above 0" in capsys.readouterr().err
