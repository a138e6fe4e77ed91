"""Launchers of the ops of a whole step against their references; see ``test_interpreted.py``."""

from __future__ import annotations

import os
import runpy
from pathlib import Path

import pytest
import torch

from graphkit.ops.kernels import argmax, target_rows, tree_sampling
from graphkit.ops.registration import OPS

assert os.environ.get("TRITON_INTERPRET") == "1", "run test_interpreted.py instead"

pytestmark = pytest.mark.filterwarnings("ignore:overflow")  # of numpy, as the op documents
CASES, results, assert_equal = map(
    runpy.run_path(str(Path(__file__).with_name("step_cases.py"))).get,
    ("CASES", "results", "assert_equal"),
)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Let small cases need several blocks."""
    monkeypatch.setattr(argmax, "MAX_BLOCK", 64)
    monkeypatch.setattr(tree_sampling, "MAX_BLOCK", 4)
    monkeypatch.setattr(target_rows, "MAX_NODES", 4)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("requests", [0, 3])
def test_launchers_match_the_references(name, requests):
    op, make, _ = CASES[name]
    registered = OPS[op.__name__]
    for seed in range(6):
        ours, theirs = make(requests, seed), make(requests, seed)
        got = results(registered.launch(registered.arguments(*ours)), ours)
        assert_equal(got, results(op(*theirs), theirs))


@pytest.mark.parametrize("name", CASES)
def test_inputs_may_be_strided(name):
    op, make, _ = CASES[name]
    registered = OPS[op.__name__]
    args = make(3, 4)
    spaced = [
        each.repeat_interleave(2, -1)[..., ::2] if isinstance(each, torch.Tensor) else each
        for each in args
    ]
    is_written = registered.fake is None
    spaced = [args[0], *spaced[1:]] if is_written else spaced
    got = results(registered.launch(registered.arguments(*spaced)), spaced)
    theirs = make(3, 4)
    assert_equal(got, results(op(*theirs), theirs))
