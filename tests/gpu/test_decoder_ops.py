"""Kernels of decoder layers on CUDA against their references on the CPU."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch

from graphkit.ops.decoder import add_rms_norm, embed_and_join, rms_norm
from graphkit.ops.heads import rotated_heads, store_rotated_heads
from graphkit.ops.kernels import heads
from graphkit.ops.kv_cache import store_kv

pytestmark = pytest.mark.gpu
CASES = runpy.run_path(str(Path(__file__).parents[1] / "unit" / "ops" / "decoder_cases.py"))


@pytest.mark.sanitized
def test_kernels_match_the_references():
    def on_cpu(each):
        return each.cpu() if isinstance(each, torch.Tensor) else each

    for op, args in CASES["cases"](torch.device("cuda")):
        got = op(*args)
        got = tuple(map(on_cpu, got)) if isinstance(got, tuple) else on_cpu(got)
        CASES["assert_close"](got, op(*map(on_cpu, args)))


@pytest.mark.parametrize("processors", [1, 132], ids=["several heads", "one head"])
def test_heads_are_stored_as_by_two_kernels(processors, monkeypatch):
    """A program has several heads if the device seems to have one multiprocessor."""
    monkeypatch.setattr(heads, "multiprocessors", lambda _: (processors, 0))
    for caches, slots, scales, rotation in CASES["store_cases"](torch.device("cuda"), outside=True):
        expected = CASES["copies"](caches)
        query, key, value = rotated_heads(*rotation)
        store_kv(*expected, slots, key, value, *scales)
        assert torch.equal(store_rotated_heads(*caches, slots, *rotation, *scales), query)
        for got, other in zip(caches, expected, strict=True):
            assert torch.equal(got.float(), other.float())


DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [64, 96, 2304, 4096, 20_000])
@pytest.mark.parametrize("rows", [1, 3, 8])
def test_joined_halves_are_those_of_two_norms(dtype, width, rows):
    """Bit by bit, since sums run in the same order, for ids of both dtypes and tied weights."""
    torch.manual_seed(width + rows)
    embedding, hidden, *weights = (
        torch.randn(shape, device="cuda").to(dtype)
        for shape in ((50, width), (rows, width), (width,), (width,))
    )
    tables = embedding, embedding.t().contiguous().t()
    for ids in (torch.randint(50, (rows,), device="cuda"), torch.arange(rows, device="cuda").int()):
        halves = rms_norm(embedding[ids], weights[0], 1e-5), rms_norm(hidden, weights[1], 1e-5)
        for table in tables:
            joined = embed_and_join(ids, table, hidden, *weights, 1e-5)
            assert torch.equal(joined, torch.cat(halves, 1))
            plain = embed_and_join(ids, table, hidden)
            assert torch.equal(plain, torch.cat((embedding[ids], hidden), 1))
        spaced = joined[:, width:]
        got = add_rms_norm(hidden, spaced, weights[0], 1e-5)
        expected = add_rms_norm(hidden, spaced.contiguous(), weights[0], 1e-5)
        assert all(map(torch.equal, got, expected))


def test_an_id_outside_the_embedding_counts_as_the_nearest():
    embedding, hidden = torch.randn(4, 96, device="cuda"), torch.zeros(4, 96, device="cuda")
    ids = torch.tensor([-1, 0, 4, 2**40], device="cuda")
    joined = embed_and_join(ids, embedding, hidden)
    assert torch.equal(joined[:, :96], embedding[[0, 0, 3, 3]])
