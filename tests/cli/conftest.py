"""The command, run in this process, and small targets in its working directory."""

from __future__ import annotations

import importlib
import itertools
import re
import sys
import threading
from dataclasses import dataclass

import pytest
import torch

from graphkit.cli import main, output

names = (f"graphkit_tests_cli_{number}" for number in itertools.count())

SOURCE = """
import dataclasses
import torch
from torch import nn
import graphkit as gk

VERIFY, DECODE = gk.ForwardMode.TARGET_VERIFY, gk.ForwardMode.DECODE
torch.manual_seed(0)
embedding, head = nn.Embedding(32, 8), nn.Linear(8, 32)

def sample_batch(mode, batch_size, seed):
    generator = torch.Generator().manual_seed(seed)
    tokens = batch_size * (4 if mode is VERIFY else 1)
    return gk.TargetVerifyInputs(
        req_pool_indices=torch.arange(1, batch_size + 1),
        seq_lens=torch.full((batch_size,), 5, dtype=torch.int32),
        input_ids=torch.randint(1, 32, (tokens,), generator=generator),
        positions=torch.arange(tokens),
        out_cache_loc=torch.arange(1, tokens + 1),
    )

def target(mix, name="tiny", largest=2):
    def forward(inputs):
        return gk.ForwardOutput(next_token_logits=head(mix(embedding(inputs.input_ids), inputs)))
    return gk.CaptureTarget(
        name=name, spec=gk.SpecConfig("EAGLE", 3, 1, 4),
        sizes=gk.BufferSizes(largest, 64, 8, 32, torch.float32),
        forwards={VERIFY: forward, DECODE: forward}, sample_batch=sample_batch)

def synchronises(hidden, inputs):
    return hidden * inputs.seq_lens.max().item()

calls = []
def counts(hidden, inputs):
    calls.append(1)
    return hidden * len(calls)

def interrupted(hidden, inputs):
    raise KeyboardInterrupt

def no_batch(*_):
    raise LookupError("no batch today\\nat all")

right = target(lambda hidden, inputs: hidden + inputs.positions[:, None])
gives_none = dataclasses.replace(right, sample_batch=no_batch)
bad_setter = dataclasses.replace(right, host_values={"scale": (no_batch, [1, 2])})
leaks = target(lambda hidden, inputs: hidden + hidden.mean(0))
leaks_often = target(lambda hidden, inputs: hidden + hidden.mean(0), largest=5)
bakes = target(counts)
syncs = target(synchronises)
stops = target(interrupted)
"""


@dataclass(frozen=True)
class Ended:
    """Exit code and output of a command."""

    code: int
    out: str
    err: str

    @property
    def messages(self):
        """Lines on stderr after the announcement of the work.

        Without those of progress, which a slow machine prints every ten seconds.
        """
        progress = re.compile(r"\(\d+ of \d+ done\)$")
        lines = [line for line in self.err.splitlines() if line and not progress.search(line)]
        return lines[bool(lines and re.match("(capturing|auditing|measuring) ", lines[0])) :]

    @property
    def error(self):
        """The only message, which is an error."""
        (line,) = self.messages
        assert line.startswith("error: ")
        return line


@pytest.fixture(autouse=True)
def without_cuda(monkeypatch):
    """Hide CUDA devices: the targets below are on the CPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture(autouse=True)
def without_progress(monkeypatch):
    """Print no line of progress, however long a command takes on a busy machine."""
    monkeypatch.setattr(output, "_SECONDS", threading.TIMEOUT_MAX)


@pytest.fixture
def run(capsys):
    """Return ``run(argument, ...)``, which runs ``graphkit`` in this process."""

    def command(*arguments):
        capsys.readouterr()
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as ended:  # raised by argparse
            code = ended.code
        return Ended(code, *capsys.readouterr())

    return command


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Change to an empty working directory."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return folder


@pytest.fixture
def tiny(tmp_path, here, monkeypatch):
    """Write a module with targets and yield its name."""
    name = next(names)
    (tmp_path / f"{name}.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    yield name
    sys.modules.pop(name, None)


@pytest.fixture(scope="session")
def saved_once(tmp_path_factory):
    """Return the text of a record of two modes, which is made once."""
    folder = tmp_path_factory.mktemp("saved")
    name = next(names)
    (folder / f"{name}.py").write_text(SOURCE)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.setattr(torch.cuda, "is_available", lambda: False)
        importlib.invalidate_caches()
        assert main(["capture", f"{name}:right", "--out", str(folder / "record.json")]) == 0
    return (folder / "record.json").read_text()


@pytest.fixture
def saved(saved_once, here):
    """Save that record."""
    path = here / "record.json"
    path.write_text(saved_once)
    return path
