"""Launchers of the ops that copy rows against their references; see ``test_interpreted.py``."""

from __future__ import annotations

import os
import runpy
from pathlib import Path

import pytest
import torch

from graphkit.ops.kernels import rows
from graphkit.ops.registration import OPS
from graphkit.ops.rows import gather_rows, scatter_rows

assert os.environ.get("TRITON_INTERPRET") == "1", "run test_interpreted.py instead"

CASES = runpy.run_path(str(Path(__file__).with_name("row_cases.py")))
CPU = torch.device("cpu")
blocks = pytest.mark.parametrize("block", [512, 4096], ids=["several blocks", "one block"])


def launched(op, *args):
    registered = OPS[op.__name__]
    return registered.launch(registered.arguments(*args))


@blocks
def test_gathered_rows_match_the_reference(block, monkeypatch):
    monkeypatch.setattr(rows, "MAX_BLOCK", block)
    for source, index in CASES["gathers"](CPU):
        got = launched(gather_rows, source, index)
        assert torch.equal(got, source[index.long()])
        assert got.is_contiguous()


@blocks
def test_scattered_rows_match_the_reference(block, monkeypatch):
    monkeypatch.setattr(rows, "MAX_BLOCK", block)
    for targets, sources, index in CASES["scatters"](CPU):
        expected = [target.clone() for target in targets]
        scatter_rows(expected, sources, index)
        launched(scatter_rows, targets, sources, index)
        assert all(map(torch.equal, targets, expected))


def test_rows_outside_are_the_nearest_or_dropped():
    source, outside = torch.arange(8.0).view(4, 2), torch.tensor([-1, 1, 4, 2**40])
    assert torch.equal(launched(gather_rows, source, outside), source[[0, 1, 3, 3]])
    target = torch.zeros(4, 2)
    launched(scatter_rows, [target], [source], outside)
    assert target.tolist() == [[0, 0], [2, 3], [0, 0], [0, 0]]
