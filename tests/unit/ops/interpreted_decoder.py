"""Launchers of the ops of decoder layers against their references; see ``test_interpreted.py``."""

from __future__ import annotations

import os
import runpy
from pathlib import Path

import pytest
import torch

from graphkit.ops.kernels import decoder
from graphkit.ops.registration import OPS

assert os.environ.get("TRITON_INTERPRET") == "1", "run test_interpreted.py instead"

CASES = runpy.run_path(str(Path(__file__).with_name("decoder_cases.py")))


NORMS = ("rms_norm", "add_rms_norm")


def check(is_checked):
    for op, args in CASES["cases"](torch.device("cpu")):
        registered = OPS[op.__name__]
        if is_checked(op.__name__):
            CASES["assert_close"](registered.launch(registered.arguments(*args)), op(*args))


@pytest.mark.parametrize("block", [64, 1024], ids=["several blocks", "one block"])
def test_norms_match_the_references(block, monkeypatch):
    monkeypatch.setattr(decoder, "NORM_BLOCK", block)
    check(lambda name: name in NORMS)


def test_other_launchers_match_the_references():
    check(lambda name: name not in NORMS)


def launch(name, *args):
    return OPS[name].launch(OPS[name].arguments(*args))


def test_heads_are_stored_as_by_two_launches():
    for caches, slots, scales, rotation in CASES["store_cases"](torch.device("cpu"), outside=True):
        expected = CASES["copies"](caches)
        query, key, value = launch("rotated_heads", *rotation)
        launch("store_kv", *expected, slots, key, value, *scales)
        assert torch.equal(launch("store_rotated_heads", *caches, slots, *rotation, *scales), query)
        for got, other in zip(caches, expected, strict=True):
            assert torch.equal(got.float(), other.float())
