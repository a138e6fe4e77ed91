"""Ops of decoder layers on every device: values, gradients, fakes and refusals."""

from __future__ import annotations

from itertools import islice, product
from types import SimpleNamespace

import pytest
import torch

from graphkit import AttentionError, InputError
from graphkit.ops.decoder import (
    add_rms_norm,
    embed_and_join,
    gated_rms_norm,
    rms_norm,
    silu_and_mul,
)
from graphkit.ops.heads import ProjectedHeads, rotated_heads, store_rotated_heads
from graphkit.ops.kernels import decoder, heads as head_kernels
from graphkit.ops.kv_cache import FP8, store_kv
from graphkit.ops.latent_heads import store_latent_heads
from graphkit.ops.registration import OPS
from op_devices import CPU, CUDA, INTERPRETER, by

ROWS, WIDTH = 3, 8
FREQUENCIES = torch.tensor([1.0, 0.1])
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
IDS = (torch.int32, torch.int64)
ROUNDINGS = 4
"""Roundings of the dtype by which a kernel may differ: sums run in another order."""


def cases():
    """Yield ops and arguments: no, one and several rows; widths that are no powers of two."""
    generator = torch.Generator().manual_seed(1)

    def random(*shape, dtype):
        return torch.randn(shape, generator=generator).to(dtype)

    for dtype, rows, width in product(DTYPES, (0, 1, 5), (1, 24, 200)):
        x, residual, weight = (
            random(*shape, dtype=dtype) for shape in ((rows, width), (rows, width), (width,))
        )
        yield rms_norm, (x, weight, 1e-6)
        yield add_rms_norm, (x, residual, weight, 1e-5)
        parts = random(3, rows, width, dtype=torch.float32)
        yield add_rms_norm, (parts, residual, weight, 1e-5)
        yield add_rms_norm, (x, residual.float(), weight, 1e-5, True)
        yield silu_and_mul, (3 * random(rows, 2 * width, dtype=dtype),)
        gate, columns = random(rows, width + 5, dtype=dtype), torch.randperm(width)
        for gate_first, sigmoid in product((False, True), repeat=2):
            one = random(width // 8 or 1, dtype=dtype)  # a weight for all groups
            order = columns if sigmoid else None
            yield gated_rms_norm, (x, gate, weight, 1e-5, len(one), gate_first, sigmoid, order)
            yield gated_rms_norm, (x, gate, one, 1e-5, len(one), gate_first, sigmoid, order)
        both = random(rows, 2 * width, dtype=dtype)
        yield add_rms_norm, (x, both[:, width:], weight, 1e-5)  # a view with spaced rows
    for dtype, rows, width in product(DTYPES, (0, 1, 3, 8), (24, 64, 96, 2304)):
        ids = torch.randint(0, 7, (rows,), generator=generator).to(IDS[rows % 2])
        embedding, hidden = random(7, width, dtype=dtype), random(rows, width, dtype=dtype)
        norms = random(2, width, dtype=dtype).unbind()
        yield embed_and_join, (ids, embedding, hidden, *norms, 1e-5)
        yield embed_and_join, (ids, embedding.t().contiguous().t(), hidden, norms[0], None, 1e-6)
        yield embed_and_join, (ids, embedding, hidden)
    for dtype, rows, half, has_norm in product(DTYPES, (0, 1, 5), (1, 12, 64), (False, True)):
        frequencies = 1.0 / 10000 ** (torch.arange(half) / half)
        positions = torch.randint(0, 100_000, (rows,), generator=generator)
        norms = (None, None, 0.0)
        if has_norm:
            norms = (random(2 * half, dtype=dtype), random(2 * half, dtype=dtype), 1e-6)
        qkv = random(rows, 14 * half, dtype=dtype)
        yield rotated_heads, (qkv, positions, frequencies, 3, 2, *norms)
        parts = random(2, rows, 14 * half, dtype=torch.float32)
        yield rotated_heads, (parts, positions, frequencies, 3, 2, *norms, dtype)
        gated = random(rows, 20 * half, dtype=dtype)
        rotated = half // 4 * 2
        of_gates = None, rotated, True, 1.25 if half == 12 else 1.0
        yield rotated_heads, (gated, positions, frequencies, 3, 2, *norms, *of_gates)


STORES = [
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.float32, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.bfloat16, FP8),
    (torch.float32, FP8),
]
"""Dtypes of rows and of caches."""


def store_cases(*, outside, every=1):
    """Yield the caches, slots, scales and arguments of ``rotated_heads`` of a store.

    Args:
        outside: Whether some slots are outside of the caches, which the CPU refuses.
        every: Step through the combinations of dtypes and head size. 2 takes every second one: the
            interpreter needs a second for each.
    """
    generator = torch.Generator().manual_seed(4)

    def random(*shape, dtype):
        return torch.randn(shape, generator=generator).to(dtype)

    sizes = (2, 24, 80, 96, 128)
    for (dtype, stored), size in islice(product(STORES, sizes), None, None, every):
        for rows, heads, keys in ((0, 3, 1), (1, 4, 4), (6, 6, 2), (5, 0, 3)):
            has_norm, has_parts, is_joined = size not in (24, 128), size != 96, size == 80
            shape = rows, (heads + 2 * keys) * size
            qkv = random(*(2, *shape) if has_parts else shape, dtype=dtype)
            qkv = 3 * qkv.to(torch.float32 if has_parts else dtype)
            positions = torch.randint(0, 100_000, (rows,), generator=generator)
            frequencies = 1.0 / 10000 ** (torch.arange(0, size, 2) / size)
            weights = (None, None)
            if has_norm:
                weights = random(size, dtype=dtype), random(size, dtype=dtype)
            rotation = (qkv, positions, frequencies, heads, keys, *weights, 1e-6, dtype)
            caches = [torch.zeros(11, keys, size, dtype=stored) for _ in "kv"]
            if is_joined:  # two parts of a buffer
                buffer = torch.zeros(11, 1, 2 * keys * size, dtype=stored)
                caches = [each.unflatten(2, (keys, size))[:, 0] for each in buffer.chunk(2, 2)]
            slots = torch.tensor([7, 0, 10, 3, 2, 5])[:rows]
            if outside and rows > 3:
                slots[1], slots[3] = -1, 11
            scales = [None, None]
            if stored == FP8 and size != 128:
                scales = [random(keys, dtype=torch.float32).abs() + 0.1 for _ in "kv"]
            yield caches, slots, scales, rotation


def copies(caches):
    """Return caches of the same layout with the same contents."""
    made = [torch.empty_strided(each.shape, each.stride(), dtype=each.dtype) for each in caches]
    return [one.copy_(other) for one, other in zip(made, caches, strict=True)]


def assert_close(got, expected):
    """Compare results of equal dtypes and shapes up to a few roundings."""
    both = (each if isinstance(each, tuple) else (each,) for each in (got, expected))
    for one, other in zip(*both, strict=True):
        eps = torch.finfo(other.dtype).eps
        torch.testing.assert_close(one, other, rtol=ROUNDINGS * eps, atol=ROUNDINGS * eps)


NORMS = ("rms_norm", "add_rms_norm", "embed_and_join")
blocks = pytest.mark.parametrize("block", [64, 1024], ids=["several blocks", "one block"])
heads_of_programs = pytest.mark.parametrize(
    "processors", [1, 132], ids=["several heads", "one head"]
)
"""On a device of one multiprocessor, a program has several heads."""


@pytest.mark.gpu
@pytest.mark.sanitized
def test_kernels_match_the_references():
    for op, args in cases():
        assert_close(CUDA(op, *args), op(*args))


@by(INTERPRETER)
@blocks
def test_norms_match_the_references(run, block, monkeypatch):
    monkeypatch.setattr(decoder, "NORM_BLOCK", block)
    for op, args in cases():
        if op.__name__ in NORMS:
            assert_close(run(op, *args), op(*args))


@by(INTERPRETER)
@heads_of_programs
def test_other_kernels_match_the_references(run, processors, monkeypatch):
    monkeypatch.setattr(head_kernels, "multiprocessors", lambda _: (processors, 0))
    for op, args in cases():
        if op.__name__ not in NORMS:
            assert_close(run(op, *args), op(*args))


@by(INTERPRETER, CUDA)
@heads_of_programs
def test_heads_are_stored_as_by_two_kernels(run, processors, monkeypatch):
    monkeypatch.setattr(head_kernels, "multiprocessors", lambda _: (processors, 0))
    every = 2 if run is INTERPRETER else 1
    for caches, slots, scales, rotation in store_cases(outside=True, every=every):
        expected = copies(caches)
        query, key, value = run(rotated_heads, *rotation)
        run(store_kv, *expected, slots, key, value, *scales)
        assert torch.equal(run(store_rotated_heads, *caches, slots, *rotation, *scales), query)
        for got, other in zip(caches, expected, strict=True):
            assert torch.equal(got.float(), other.float())


@pytest.mark.parametrize(
    ("rows", "query_heads", "norm", "heads"),
    [
        (6, 32, None, 1), (10, 32, None, 1), (11, 32, None, 2), (48, 32, None, 8),
        (4096, 32, None, 8), (4096, 28, None, 4), (4096, 33, None, 1), (48, 32, "norm", 1),
    ],
)  # fmt: skip
def test_programs_have_several_heads_if_there_are_enough_programs(rows, query_heads, norm, heads):
    args = SimpleNamespace(
        query_weight=norm, key_weight=None, query_heads=query_heads, key_heads=8,
        qkv=torch.empty(0),
    )  # fmt: skip
    assert head_kernels.program_heads(args, rows) == heads


@by(INTERPRETER)
@pytest.mark.parametrize("block", [512, 4096], ids=["several blocks", "one block"])
def test_joined_halves_are_those_of_two_norms(run, block, monkeypatch):
    """Bit by bit, since sums run in the same order."""
    monkeypatch.setattr(decoder, "NORM_BLOCK", block)
    joined = [args for op, args in cases() if op is embed_and_join]
    assert joined
    for args in joined:
        ids, embedding, hidden, *norms = (*args, None, None, 0.0)[:6]
        halves = embedding.index_select(0, ids), hidden
        normed = [
            rows if weight is None else run(rms_norm, rows, weight, norms[2])
            for rows, weight in zip(halves, norms, strict=False)
        ]
        assert torch.equal(run(embed_and_join, *args), torch.cat(normed, 1))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [64, 96, 2304, 4096, 20_000])
@pytest.mark.parametrize("rows", [1, 3, 8])
def test_joined_halves_and_spaced_rows_have_the_bits_of_two_norms(dtype, width, rows):
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


@by(INTERPRETER, CUDA)
@pytest.mark.parametrize("width", [3, 96])
def test_an_id_outside_the_embedding_counts_as_the_nearest(run, width):
    embedding, hidden = torch.randn(4, width), torch.zeros(4, width)
    ids = torch.tensor([-1, 0, 4, 2**40])
    joined = run(embed_and_join, ids, embedding, hidden)
    assert torch.equal(joined[:, :width], embedding[[0, 0, 3, 3]])


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
    calls = [args for other, args in cases() if other is op]
    for args in calls[:: len(calls) // 6]:
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
    stream = residual.float() + rows.float()  # of float32, which the norm reads rounded
    got = add_rms_norm(parts, residual.float(), weight.bfloat16(), 1e-6, True)
    assert torch.equal(got[0], rms_norm(stream.bfloat16(), weight.bfloat16(), 1e-6))
    assert torch.equal(got[1], stream)
    rest = torch.arange(ROWS), FREQUENCIES, 2, 1
    got = rotated_heads(parts, *rest, dtype=torch.bfloat16)
    assert all(map(torch.equal, got, rotated_heads(rows, *rest)))


@by(CPU, INTERPRETER, CUDA)
@pytest.mark.parametrize("factor", [1.0, 1.25])
def test_a_part_of_each_head_is_rotated_and_gates_are_left_out(run, factor):
    generator = torch.Generator().manual_seed(7)
    heads = torch.randn(ROWS, 2 + 2 + 1 + 1, 16, generator=generator)  # queries with gates
    frequencies = torch.cat([torch.tensor([1.0, 0.1, 0.01]), torch.full((5,), 9.0)])
    args = torch.arange(ROWS), frequencies, 2, 1
    weights = torch.randn(2, 16, generator=generator).unbind()
    found = run(rotated_heads, heads.flatten(1), *args, *weights, 1e-6, None, 6, True, factor)
    kept = heads[:, [0, 2, 4, 5]]
    whole = run(rotated_heads, kept.flatten(1), args[0], torch.zeros(8), 2, 1, *weights, 1e-6)
    for got, plain in zip(found[:2], whole[:2], strict=True):
        torch.testing.assert_close(got[..., 6:], plain[..., 6:])
        angles = args[0][:, None, None] * frequencies[:3]
        one, other = plain[..., :3], plain[..., 3:6]
        turned = (
            one * angles.cos() - other * angles.sin(),
            other * angles.cos() + one * angles.sin(),
        )
        torch.testing.assert_close(got[..., :6], factor * torch.cat(turned, -1))
    assert torch.equal(found[2], heads[:, 5:])
    caches = [torch.zeros(ROWS + 1, 1, 16) for _ in "kv"]
    slots = torch.arange(ROWS) + 1
    options = None, None, None, 6, True, factor
    query = run(
        store_rotated_heads, *caches, slots, heads.flatten(1), *args, *weights, 1e-6, *options
    )
    assert torch.equal(query, found[0])
    assert all(map(torch.equal, (caches[0][1:], caches[1][1:]), found[1:]))


@by(CPU, INTERPRETER, CUDA)
def test_queries_or_keys_alone_may_be_normalised(run):
    generator = torch.Generator().manual_seed(6)
    qkv, weight = (torch.randn(shape, generator=generator) for shape in ((ROWS, 16), (4,)))
    args = qkv, torch.arange(ROWS), FREQUENCIES, 2, 1
    query, key, _ = run(rotated_heads, *args)
    normed_query, normed_key, _ = run(rotated_heads, *args, weight, weight, 1e-6)
    assert not torch.equal(query, normed_query)
    got = run(rotated_heads, *args, weight, None, 1e-6)
    assert all(map(torch.equal, got[:2], (normed_query, key)))
    got = run(rotated_heads, *args, None, weight, 1e-6)
    assert all(map(torch.equal, got[:2], (query, normed_key)))


@pytest.mark.parametrize("rows", [1, 3])
def test_rotated_heads_share_no_memory(rows):
    """A slice of one row is contiguous, so it is a view unless it is copied."""
    found = rotated_heads(torch.ones(rows, 16), torch.arange(rows), FREQUENCIES, 2, 1)
    assert all(each.is_contiguous() for each in found)
    assert len({each.untyped_storage().data_ptr() for each in found}) == 3


LATENT_SHAPES = [(0, 4, 32, 8), (1, 3, 24, 4), (5, 16, 512, 32), (300, 8, 64, 16)]
"""Rows, heads, rank and rotated pairs."""


def latent_arguments(shape, dtype, generator):
    """Return the arguments of ``store_latent_heads`` up to ``eps``; rows and heads are views."""
    rows, heads, rank, half = shape
    cache = torch.randn(2 * rows + 3, 1, rank + 2 * half, generator=generator).to(dtype)
    slots = torch.randperm(len(cache), generator=generator)[:rows]
    latent = torch.randn(rows, heads, rank, generator=generator).to(dtype).transpose(0, 1)
    columns = heads * (3 + 2 * half), rank + 2 * half
    joint = 3 * torch.randn(rows, sum(columns), generator=generator).to(dtype)
    query, latents = joint.split(columns, -1)
    rotated = query.unflatten(-1, (heads, -1))[..., 3:]
    positions = torch.randint(0, 5000, (rows,), generator=generator)
    frequencies = 1.0 / 10000 ** (torch.arange(half) / half)
    weight = torch.randn(rank, generator=generator).to(dtype)
    return cache, slots, latent, rotated, latents, positions, frequencies, weight, 1e-6


def turned(x, turn, interleaved, splits):
    """Return heads, [T, N, 2 * F], times complex numbers, [T, F], in float64."""
    pairs = x.double().unflatten(-1, (-1, 2) if interleaved else (2, -1))
    pairs = pairs if interleaved else pairs.mT
    pairs = torch.view_as_real(
        torch.view_as_complex(pairs.clone(memory_format=torch.contiguous_format)) * turn[:, None]
    )
    return (pairs if interleaved and not splits else pairs.mT).flatten(-2)


@by(CPU, INTERPRETER, CUDA)
@pytest.mark.parametrize(
    "pairs", [(False, False), (True, False), (True, True)], ids=["halves", "neighbours", "split"]
)
def test_latents_are_normalised_rotated_and_stored(run, pairs):
    generator = torch.Generator().manual_seed(2)
    for shape, dtype in product(LATENT_SHAPES, DTYPES):
        if run is INTERPRETER and shape[0] > 5:
            continue
        args = latent_arguments(shape, dtype, generator)
        cache, slots, latent, rotated, latents, positions, frequencies, weight, eps = args
        angles, rank = (positions[:, None] * frequencies).double(), shape[2]
        turn = torch.polar(torch.full_like(angles, 1.25), angles)
        wide = latents[:, :rank].double()
        normed = weight.double() * wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt()
        key = turned(latents[:, None, rank:], turn, *pairs)[:, 0]
        stored = cache.double()
        stored[slots, 0] = torch.cat([normed, key], -1)
        query = torch.cat([latent.transpose(0, 1).double(), turned(rotated, turn, *pairs)], -1)
        got = run(store_latent_heads, *args, 1.25, *pairs)
        # Angles of float32 deviate by up to 3e-4 at these positions.
        limit = {"rtol": ROUNDINGS * torch.finfo(dtype).eps, "atol": 5e-3}
        torch.testing.assert_close(got.double(), query, **limit)
        torch.testing.assert_close(cache.double(), stored, **limit)


def test_a_row_of_latents_outside_the_cache_is_dropped_on_cuda_alone():
    args = list(latent_arguments((2, 3, 24, 4), torch.float32, torch.Generator()))
    args[1] = torch.tensor([len(args[0]), 1])
    with pytest.raises(IndexError):
        store_latent_heads(*args)


@pytest.mark.parametrize(
    ("index", "change", "text"),
    [
        (0, lambda cache: cache[..., :-1], "cache"),
        (2, lambda latent: latent[1:], "rotated_TNE"),
        (3, lambda rotated: rotated.mT.contiguous().mT, "contiguous elements of a head"),
        (4, lambda latents: latents.double(), "latents_TC"),
        (7, lambda weight: weight[1:], "weight"),
    ],
)
def test_latents_of_other_shapes_are_refused(index, change, text):
    args = list(latent_arguments((2, 3, 24, 4), torch.float32, torch.Generator()))
    args[index] = change(args[index])
    with pytest.raises(AttentionError, match=rf"^store_latent_heads: .*{text}"):
        store_latent_heads(*args)


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
    for caches, slots, scales, rotation in store_cases(outside=False):
        expected, others = copies(caches), copies(caches)
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
