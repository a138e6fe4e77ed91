"""The shipped weights: their size, their dtype, and the acceptance of their drafts."""

from __future__ import annotations

import inspect
import json
import textwrap

import pytest
import torch
from safetensors.torch import load_file

from graphkit.models.reference import default_checkpoint
from graphkit.models.tokenizer import encode

FOLDERS = {
    "target": default_checkpoint(),
    "eagle": default_checkpoint("eagle"),
    "eagle3": default_checkpoint("eagle3"),
    "mtp": default_checkpoint("mtp"),
    "dflash": default_checkpoint("dflash"),
    "standalone": default_checkpoint("standalone"),
}


def test_no_other_files_ship():
    root = FOLDERS["target"].parent
    assert {folder.name for folder in root.iterdir()} == set(FOLDERS)
    for folder in FOLDERS.values():
        files = {path.name for path in folder.iterdir()}
        assert files == {"config.json", "model.safetensors", "training.json"}


def test_all_weights_together_stay_below_their_limit():
    files = (path for folder in FOLDERS.values() for path in folder.iterdir())
    assert sum(path.stat().st_size for path in files) <= 19 * 2**20


@pytest.mark.parametrize("name", FOLDERS)
def test_weights_are_bfloat16_and_finite(name):
    assert json.loads((FOLDERS[name] / "config.json").read_text())["dtype"] == "bfloat16"
    for tensor in load_file(FOLDERS[name] / "model.safetensors").values():
        assert tensor.dtype in (torch.bfloat16, torch.int64)
        assert tensor.isfinite().all()


@pytest.mark.parametrize(
    ("name", "least"),
    [("eagle", 2.5), ("eagle3", 2.5), ("mtp", 2.5), ("standalone", 2.2), ("dflash", 1.4)],
)
def test_the_target_accepts_their_drafts(name, least, tool, training):
    target = tool.load_target(default_checkpoint(), "cpu", torch.float32)
    text = torch.tensor(encode(inspect.getsource(textwrap))[2048 : 2048 + 513])[None]
    recipe = training.recipes.RECIPES[name]
    results = recipe.measure(FOLDERS[name], target, (text,))
    assert results["accept_length"] > least
    facts = json.loads((FOLDERS[name] / "training.json").read_text())
    assert facts["accept_length"] > least
