"""Weight files of ``torch.save``: loaded without executing code, or refused."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file
from training.folders import save_draft_head

from graphkit.errors import CheckpointError
from graphkit.models.heads.load import load_head

BIN = "pytorch_model.bin"


def to_bin(folder):
    path = folder / "model.safetensors"
    torch.save(load_file(path), folder / BIN)
    path.unlink()


@pytest.fixture
def folder(eagle, tmp_path):
    """An EAGLE head in the format of most published ones."""
    save_draft_head(eagle, tmp_path)
    to_bin(tmp_path)
    return tmp_path


def refused(folder, target, match):
    with pytest.raises(CheckpointError, match=match) as caught:
        load_head("EAGLE", folder, target)
    assert "\n" not in str(caught.value)


def test_it_is_read(folder, eagle, target):
    assert torch.equal(load_head("EAGLE", folder, target).fc.weight, eagle.fc.weight)


@pytest.mark.parametrize("keep", [0, 5, 100, 3000, -100])
def test_cut_short(keep, folder, target):
    path = folder / BIN
    path.write_bytes(path.read_bytes()[:keep])
    refused(folder, target, "is not a file of PyTorch tensors")


@pytest.mark.parametrize("content", [b"abc", b"\x80\x02.", b"version https://git-lfs", b"s"])
def test_no_pickle(content, folder, target):
    (folder / BIN).write_bytes(content)
    refused(folder, target, "is not a file of PyTorch tensors")


class Payload:
    """Calls a function when it is unpickled."""

    def __reduce__(self):
        return pytest.fail, ("unpickling ran code",)


def test_code_is_not_run(eagle, folder, target):
    torch.save(eagle.state_dict() | {"payload": Payload()}, folder / BIN)
    refused(folder, target, "is not a file of PyTorch tensors")


@pytest.mark.parametrize("stored", [[torch.ones(2)], {"fc.weight": 3}, torch.ones(2)])
def test_more_than_tensors(stored, folder, target):
    torch.save(stored, folder / BIN)
    refused(folder, target, "must contain a dict from names to tensors")


def test_safetensors_are_preferred(eagle, folder, target):
    save_draft_head(eagle, folder)
    (folder / BIN).write_bytes(b"not read")
    load_head("EAGLE", folder, target)


def test_shards_are_read_by_their_index(folder, eagle, target):
    tensors = torch.load(folder / BIN)
    (folder / BIN).unlink()
    places = {name: f"pytorch_model-{number}.bin" for number, name in enumerate(tensors)}
    for name, place in places.items():
        torch.save({name: tensors[name]}, folder / place)
    (folder / f"{BIN}.index.json").write_text(json.dumps({"weight_map": places}))
    assert torch.equal(load_head("EAGLE", folder, target).fc.weight, eagle.fc.weight)
