"""Launchers of the ops of decoder layers against their references; see ``test_interpreted.py``."""

from __future__ import annotations

import os
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from graphkit.ops.kernels import decoder, heads
from graphkit.ops.registration import OPS

assert os.environ.get("TRITON_INTERPRET") == "1", "run test_interpreted.py instead"

CASES = runpy.run_path(str(Path(__file__).with_name("decoder_cases.py")))


NORMS = ("rms_norm", "add_rms_norm", "embed_and_join")


def check(is_checked):
    for op, args in CASES["cases"](torch.device("cpu")):
        registered = OPS[op.__name__]
        if is_checked(op.__name__):
            CASES["assert_close"](registered.launch(registered.arguments(*args)), op(*args))


@pytest.mark.parametrize("block", [64, 1024], ids=["several blocks", "one block"])
def test_norms_match_the_references(block, monkeypatch):
    monkeypatch.setattr(decoder, "NORM_BLOCK", block)
    check(lambda name: name in NORMS)


@pytest.mark.parametrize("processors", [1, 132], ids=["several heads", "one head"])
def test_other_launchers_match_the_references(processors, monkeypatch):
    monkeypatch.setattr(heads, "multiprocessors", lambda _: (processors, 0))
    check(lambda name: name not in NORMS)


def launch(name, *args):
    return OPS[name].launch(OPS[name].arguments(*args))


@pytest.mark.parametrize("processors", [1, 132], ids=["several heads", "one head"])
def test_heads_are_stored_as_by_two_launches(processors, monkeypatch):
    """On a device of one multiprocessor, a program has several heads."""
    monkeypatch.setattr(heads, "multiprocessors", lambda _: (processors, 0))
    cases = CASES["store_cases"](torch.device("cpu"), outside=True, every=2)
    for caches, slots, scales, rotation in cases:
        expected = CASES["copies"](caches)
        query, key, value = launch("rotated_heads", *rotation)
        launch("store_kv", *expected, slots, key, value, *scales)
        assert torch.equal(launch("store_rotated_heads", *caches, slots, *rotation, *scales), query)
        for got, other in zip(caches, expected, strict=True):
            assert torch.equal(got.float(), other.float())


@pytest.mark.parametrize(
    ("rows", "query_heads", "norm", "found"),
    [
        (6, 32, None, 1), (10, 32, None, 1), (11, 32, None, 2), (48, 32, None, 8),
        (4096, 32, None, 8), (4096, 28, None, 4), (4096, 33, None, 1), (48, 32, "norm", 1),
    ],
)  # fmt: skip
def test_programs_have_several_heads_if_there_are_enough_programs(rows, query_heads, norm, found):
    args = SimpleNamespace(
        query_weight=norm, key_weight=None, query_heads=query_heads, key_heads=8,
        qkv=torch.empty(0),
    )  # fmt: skip
    assert heads.program_heads(args, rows) == found


@pytest.mark.parametrize("block", [512, 4096], ids=["several blocks", "one block"])
def test_joined_halves_are_those_of_two_norms(block, monkeypatch):
    """Bit by bit, since sums run in the same order."""
    monkeypatch.setattr(decoder, "NORM_BLOCK", block)
    joined = [args for op, args in CASES["cases"](torch.device("cpu")) if len(args[0].shape) == 1]
    assert joined
    for args in joined:
        ids, embedding, hidden, *norms = (*args, None, None, 0.0)[:6]
        halves = embedding.index_select(0, ids), hidden
        normed = [
            rows if weight is None else launch("rms_norm", rows, weight, norms[2])
            for rows, weight in zip(halves, norms, strict=False)
        ]
        assert torch.equal(launch("embed_and_join", *args), torch.cat(normed, 1))


def test_an_id_outside_the_embedding_counts_as_the_nearest():
    embedding, hidden = torch.arange(12.0).view(4, 3), torch.zeros(4, 3)
    ids = torch.tensor([-1, 0, 4, 2**40])
    joined = launch("embed_and_join", ids, embedding, hidden)
    assert torch.equal(joined[:, :3], embedding[[0, 0, 3, 3]])
