"""The shipped weights: their size, their dtype, and the acceptance of their drafts."""

from __future__ import annotations

import inspect
import json
import textwrap

import pytest
import torch

from graphkit.models.byte_tokenizer import encode
from graphkit.models.heads.folders import (
    load_dflash_head,
    load_eagle3_head,
    load_eagle_head,
    load_mtp_head,
)
from graphkit.models.reference import default_checkpoint
from graphkit.models.sharded import load_checkpoint

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
    assert sum(path.stat().st_size for path in files) <= 18 * 2**20


@pytest.mark.parametrize("name", FOLDERS)
def test_weights_are_bfloat16_and_finite(name):
    assert json.loads((FOLDERS[name] / "config.json").read_text())["dtype"] == "bfloat16"
    target = load_checkpoint(default_checkpoint())
    heads = {
        "eagle": load_eagle_head,
        "eagle3": load_eagle3_head,
        "mtp": load_mtp_head,
        "dflash": load_dflash_head,
    }
    load = heads.get(name)
    model = load(FOLDERS[name], target) if load else load_checkpoint(FOLDERS[name])
    assert all(parameter.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("name", "least"),
    [("eagle", 2.5), ("eagle3", 2.5), ("mtp", 2.5), ("standalone", 2.2), ("dflash", 1.4)],
)
def test_the_target_accepts_their_drafts(name, least, training):
    target = load_checkpoint(default_checkpoint())
    text = torch.tensor(encode(inspect.getsource(textwrap))[2048 : 2048 + 513])[None]
    layers = ()
    match name:
        case "eagle3":
            unroll, head = training.unroll.eagle3_drafts, load_eagle3_head(FOLDERS[name], target)
            layers = head.aux_layers
        case "dflash":
            unroll, head = training.unroll.dflash_drafts, load_dflash_head(FOLDERS[name], target)
            layers = head.aux_layers
        case "eagle":
            unroll, head = training.unroll.eagle_drafts, load_eagle_head(FOLDERS[name], target)
        case "mtp":
            unroll, head = training.unroll.mtp_drafts, load_mtp_head(FOLDERS[name], target)
        case _:
            unroll, head = training.unroll.standalone_drafts, load_checkpoint(FOLDERS[name])
    rates = training.losses.accept_rates(unroll, head, target, (text,), layers)
    assert training.losses.accept_length(rates[:3]) > least
    facts = json.loads((FOLDERS[name] / "training.json").read_text())
    assert facts["accept_length"] > least
