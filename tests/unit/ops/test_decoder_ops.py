"""Ops of decoder layers: gradients, fakes and refusals. ``test_agreement`` compares values."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch

from graphkit import AttentionError, InputError
from graphkit.ops.decoder import add_rms_norm, embed_and_join, rms_norm, silu_and_mul
from graphkit.ops.heads import ProjectedHeads, rotated_heads, store_rotated_heads
from graphkit.ops.kv_cache import FP8, store_kv
from graphkit.ops.registration import OPS

ROWS, WIDTH = 3, 8
FREQUENCIES = torch.tensor([1.0, 0.1])
CASES = runpy.run_path(str(Path(__file__).with_name("decoder_cases.py")))
DIFFERENTIABLE = {
    rms_norm: ([ROWS, WIDTH], [WIDTH], 1e-6),
    add_rms_norm: ([ROWS, WIDTH], [ROWS, WIDTH], [WIDTH], 1e-6),
    silu_and_mul: ([ROWS, WIDTH],),
    rotated_heads: ([ROWS, 16], torch.arange(ROWS), FREQUENCIES, 2, 1, [4], [4], 1e-6),
    embed_and_join: (torch.tensor([1, 0, 1]), [5, WIDTH], [ROWS, WIDTH], [WIDTH], [WIDTH], 1e-6),
}


def gradients(run, shapes):
    """Return results and gradients of random arguments, which replace their shapes."""
    generator = torch.Generator().manual_seed(2)
    args = [
        torch.randn(each, generator=generator).requires_grad_() if isinstance(each, list) else each
        for each in shapes
    ]
    results = run(*args)
    results = results if isinstance(results, tuple) else (results,)
    sum((each * each).sum() for each in results).backward()
    of_args = [each.grad for each in args if isinstance(each, torch.Tensor) and each.requires_grad]
    return [*results, *of_args]


@pytest.mark.parametrize("op", DIFFERENTIABLE, ids=lambda op: op.__name__)
def test_gradients_are_those_of_the_reference(op):
    got = gradients(op, DIFFERENTIABLE[op])
    expected = gradients(OPS[op.__name__].reference, DIFFERENTIABLE[op])
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("op", DIFFERENTIABLE, ids=lambda op: op.__name__)
def test_the_schema_and_the_fake_are_those_of_the_op(op):
    overload = getattr(torch.ops.graphkit, op.__name__).default
    cases = [args for each, args in CASES["cases"](torch.device("cpu")) if each is op]
    for args in cases[:: len(cases) // 6]:
        torch.library.opcheck(overload, args, test_utils=("test_schema", "test_faketensor"))


def test_inputs_of_a_head_are_the_embedding_and_the_hidden_state():
    generator = torch.Generator().manual_seed(5)
    embedding, hidden, *norms = torch.randn(4, 5, 8, generator=generator).unbind()
    norms = [norm[0] for norm in norms]
    ids = torch.tensor([4, 0, 4, 1, 2], dtype=torch.int32)
    normed = rms_norm(embedding[ids], norms[0], 1e-5), rms_norm(hidden, norms[1], 1e-5)
    joined = embed_and_join(ids, embedding, hidden, *norms, 1e-5)
    assert torch.equal(joined, torch.cat(normed, 1))
    assert torch.equal(embed_and_join(ids, embedding, hidden).view(5, 2, 8)[:, 1], hidden)
    with pytest.raises(IndexError):
        embed_and_join(ids + 1, embedding, hidden)


@pytest.mark.parametrize("count", [1, 3])
def test_parts_are_added_and_rounded_before(count):
    generator = torch.Generator().manual_seed(3)

    def random(*shape):
        return torch.randn(shape, generator=generator)

    parts, residual, weight = random(count, ROWS, 16), random(ROWS, 16).bfloat16(), random(16)
    rows = parts.sum(0).bfloat16()
    got = add_rms_norm(parts, residual, weight.bfloat16(), 1e-6)
    expected = add_rms_norm(rows, residual, weight.bfloat16(), 1e-6)
    assert all(map(torch.equal, got, expected))
    rest = torch.arange(ROWS), FREQUENCIES, 2, 1
    got = rotated_heads(parts, *rest, dtype=torch.bfloat16)
    assert all(map(torch.equal, got, rotated_heads(rows, *rest)))


@pytest.mark.parametrize("rows", [1, 3])
def test_rotated_heads_share_no_memory(rows):
    """A slice of one row is contiguous, so it is a view unless it is copied."""
    found = rotated_heads(torch.ones(rows, 16), torch.arange(rows), FREQUENCIES, 2, 1)
    assert all(each.is_contiguous() for each in found)
    assert len({each.untyped_storage().data_ptr() for each in found}) == 3


def test_results_that_are_not_used_need_no_gradient():
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    normed, _total = add_rms_norm(x, x.detach(), torch.ones(WIDTH), 1e-6)
    normed.sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda: rms_norm(torch.ones(2, 4), torch.ones(3), 0.0),
            r"weight is \[3\].*expected \[H\]",
        ),
        (lambda: rms_norm(torch.ones(2, 4), torch.ones(4), -1.0), "eps is -1.0, expected at least"),
        (
            lambda: add_rms_norm(torch.ones(1, 3, 4), torch.ones(2, 4), torch.ones(4), 0.0),
            r"x is \[1, 3, 4\].*expected \[S, T, H\] = \[1, 2, 4\]",
        ),
        (lambda: silu_and_mul(torch.ones(2, 5)), "expected an even number of columns"),
        (
            lambda: embed_and_join(torch.arange(2), torch.ones(3, 4).half(), torch.ones(2, 4)),
            r"hidden is \[2, 4\] float32 .*= \[2, 4\] embedding.dtype = float16",
        ),
        (
            lambda: embed_and_join(torch.arange(2), torch.ones(3, 4), torch.ones(2, 5)),
            r"hidden is \[2, 5\].*expected \[T, H\] = \[2, 4\]",
        ),
        (
            lambda: rotated_heads(torch.ones(2, 9), torch.arange(2), FREQUENCIES, 2, 1),
            r"qkv is \[2, 9\].*expected .*= \[2, 16\]",
        ),
    ],
)
def test_refusals(call, text):
    with pytest.raises(InputError, match=text):
        call()


def test_heads_are_stored_as_by_two_ops():
    for caches, slots, scales, rotation in CASES["store_cases"](torch.device("cpu"), outside=False):
        expected, others = CASES["copies"](caches), CASES["copies"](caches)
        query, key, value = rotated_heads(*rotation)
        store_kv(*expected, slots, key, value, *scales)
        heads = ProjectedHeads(*rotation)
        assert all(map(torch.equal, heads.rotated(), (query, key, value)))
        for found, written in (
            (store_rotated_heads(*caches, slots, *rotation, *scales), caches),
            (heads.store(*others, slots, *scales), others),
        ):
            assert torch.equal(found, query)
            for got, other in zip(written, expected, strict=True):
                assert torch.equal(got.float(), other.float())


def store_args(dtype=torch.float32):
    caches = (torch.zeros(6, 1, 4, dtype=dtype) for _ in "kv")
    slots, positions = torch.tensor([5, 0, 2]), torch.arange(ROWS)
    return [*caches, slots, torch.ones(ROWS, 16), positions, FREQUENCIES, 2, 1]


def test_tracers_see_the_written_caches():
    op = torch.ops.graphkit.store_rotated_heads.default
    torch.library.opcheck(op, store_args(), test_utils=("test_schema", "test_faketensor"))
    half = *store_args(), None, None, 0.0, torch.bfloat16
    torch.library.opcheck(op, half, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize(
    ("at", "change", "text"),
    [
        (0, lambda keys: keys[:, :, :3], r"key_cache is \[6, 1, 3\].*= \[6, 1, 4\]"),
        (1, lambda values: values[1:], r"value_cache is \[5, 1, 4\].*= \[6, 1, 4\]"),
        (1, lambda values: values.double(), "expected one dtype and contiguous memory"),
        (0, lambda keys: keys.repeat(1, 1, 2)[:, :, ::2], "contiguous memory within each slot"),
        (2, lambda slots: slots.int(), r"loc_T is \[3\] int32.* int64"),
        (2, lambda slots: slots[:2], r"loc_T is \[2\] int64.*= \[3\]"),
        (3, lambda rows: rows[:, :9], r"qkv is \[3, 9\].*= \[3, 16\]"),
        (7, lambda _: 0, "key_heads is 0, expected at least 1"),
    ],
)
def test_stores_that_are_refused(at, change, text):
    args = store_args()
    args[at] = change(args[at])
    with pytest.raises(AttentionError, match=rf"^store_rotated_heads: .*{text}"):
        store_rotated_heads(*args)


def test_stores_into_caches_of_another_kind_are_refused():
    with pytest.raises(AttentionError, match=r"hold torch\.int32, expected a floating-point"):
        store_rotated_heads(*store_args(torch.int32))
    scales = dict.fromkeys(("key_scale_M", "value_scale_M"), torch.ones(1))
    with pytest.raises(AttentionError, match="scales are for a cache of float8_e4m3fn"):
        store_rotated_heads(*store_args(), **scales)
    store_rotated_heads(*store_args(FP8), **scales)
    with pytest.raises(AttentionError, match=r"key_scale_M is \[2\].*= \[1\] float32"):
        store_rotated_heads(*store_args(FP8), key_scale_M=torch.ones(2))


def test_slots_outside_of_the_caches_raise_on_the_cpu():
    args = store_args()
    args[2] = args[2] + 1
    with pytest.raises(IndexError):
        store_rotated_heads(*args)
