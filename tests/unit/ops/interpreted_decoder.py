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
