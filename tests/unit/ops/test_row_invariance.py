"""The bits of a row depend on the row alone: not on other rows, their number or its place.

Every case computes all of its rows at once, and then random ones of them, in random numbers and
order. The table in ``docs/same_bits.md`` says where this does not hold.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch

import quantized_cases
from graphkit.ops.decoder import add_rms_norm, embed_and_join, rms_norm, silu_and_mul
from graphkit.ops.experts import choose_experts, expert_linear, expert_sum
from graphkit.ops.heads import rotated_heads, store_rotated_heads
from graphkit.ops.kernels import latent_heads, linear as plain_kernels
from graphkit.ops.kernels.devices import has_dependent_launch
from graphkit.ops.kv_cache import FP8
from graphkit.ops.latent_heads import store_latent_heads
from graphkit.ops.linear import linear, multiply_heads
from graphkit.ops.logits import top_candidates
from graphkit.ops.paged_attention import paged_attention
from graphkit.ops.quantized_linear import quantized_linear
from graphkit.ops.sampling import philox_uniform, target_samples
from graphkit.ops.target_probs import target_probs
from op_devices import CPU, CUDA, INTERPRETER, by

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ROWS = {CPU: 70, INTERPRETER: 7, CUDA: 300}
"""Rows of a case."""
VOCAB = 1000


def random(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def differing_rows(call, rows, seed=0, cases=8):
    """Return the numbers of rows of calls that gave other bits than the call with all rows.

    Args:
        call: Takes rows, and returns a tensor of them or several.
        rows: Tensors, [T, ...].
        seed: Of the choices.
        cases: Number of choices.
    """
    generator = torch.Generator().manual_seed(seed)
    most, whole = len(rows[0]), as_tuple(call(*rows))
    counts = [1, 2, 3, *torch.randint(1, most + 1, (cases - 3,), generator=generator).tolist()]
    found = []
    for count in counts:
        chosen = torch.randperm(most, generator=generator)[:count]
        some = as_tuple(call(*(each[chosen] for each in rows)))
        if not all(torch.equal(one, all_[chosen]) for one, all_ in zip(some, whole, strict=True)):
            found.append(count)
    return found


def as_tuple(results):
    return results if isinstance(results, tuple) else (results,)


def norm_case(run, count, dtype):
    weight = random(1, 96).to(dtype)
    return lambda x: run(rms_norm, x, weight, 1e-5), [random(2, count, 96).to(dtype)]


def added_norm_case(run, count, dtype):
    weight = random(1, 96).to(dtype)
    parts, stream = random(2, count, 3, 96), random(3, count, 96).to(dtype)

    def call(parts, stream):
        return run(add_rms_norm, parts.transpose(0, 1).contiguous(), stream, weight, 1e-5)

    return call, [parts, stream]


def inputs_case(run, count, dtype):
    table, weight = random(1, 50, 64).to(dtype), random(2, 64).to(dtype)
    ids = torch.arange(count) % 50
    hidden = random(3, count, 64).to(dtype)
    call = lambda ids, hidden: run(embed_and_join, ids, table, hidden, weight, weight, 1e-5)  # noqa: E731
    return call, [ids, hidden]


def gate_case(run, count, dtype):
    """With a width that is no multiple of a vector, whose end torch computes otherwise on a CPU."""
    return lambda x: run(silu_and_mul, x), [random(1, count, 2 * 75).to(dtype)]


def expert_sum_case(run, count, dtype):
    rows, shared = random(1, count, 2, 40).to(dtype), random(2, count, 40).to(dtype)
    factors, gate = random(3, count, 2), random(4, count, 1).to(dtype)
    experts = torch.randint(4, (count, 2), generator=torch.Generator().manual_seed(5))

    def call(rows, factors, experts, shared, gate):
        return run(expert_sum, rows.flatten(0, 1), factors, experts, 4, None, shared, gate)

    return call, [rows, factors, experts, shared, gate]


def expert_linear_case(run, count, dtype):
    weight = random(1, 4, 30, 24).to(dtype)
    experts = torch.randint(4, (count, 2), generator=torch.Generator().manual_seed(2))

    def call(rows, experts):
        products = run(expert_linear, rows, experts, weight, swiglu=True)
        return products.view(*experts.shape, -1)

    return call, [random(3, count, 24).to(dtype)[:64], experts[:64]]  # more run by torch on CUDA


def choose_experts_case(run, count, dtype):
    return lambda logits: run(choose_experts, logits, 3, True), [random(1, count, 9).to(dtype)]


def heads_case(run, count, dtype):
    frequencies, weight = random(1, 16).abs(), random(2, 32).to(dtype)
    qkv, positions = random(3, count, 8 * 32).to(dtype), torch.randint(0, 30_000, (count,))

    def call(qkv, positions):
        return run(rotated_heads, qkv, positions, frequencies, 4, 2, weight, weight, 1e-6)

    return call, [qkv, positions]


def stored_heads_case(run, count, dtype):
    _, (qkv, positions) = heads_case(run, count, dtype)
    frequencies, weight = random(1, 16).abs(), random(2, 32).to(dtype)

    def call(qkv, positions):
        caches = torch.zeros(2, len(qkv) + 1, 2, 32, dtype=dtype).unbind()
        slots = torch.arange(1, len(qkv) + 1)
        query = run(
            store_rotated_heads, *caches, slots, qkv, positions, frequencies, 4, 2, weight, weight,
            1e-6,
        )  # fmt: skip
        return query, *(cache[1:] for cache in caches)

    return call, [qkv, positions]


def latent_heads_case(run, count, dtype):
    frequencies, weight = random(1, 32).abs(), random(2, 512).to(dtype)
    latent, rotated = random(3, count, 16, 512).to(dtype), random(4, count, 16, 64).to(dtype)
    latents, positions = random(5, count, 576).to(dtype), torch.randint(0, 30_000, (count,))

    def call(latent, *others):
        cache = torch.zeros(len(latent) + 1, 1, 576, dtype=dtype)
        slots, latent = torch.arange(1, len(latent) + 1), latent.transpose(0, 1)
        *rows, positions = others
        args = cache, slots, latent, *rows, positions, frequencies, weight, 1e-6
        return run(store_latent_heads, *args), cache[1:]

    return call, [latent, rotated, latents, positions]


def sampling_case(run, count, dtype):
    """Of distributions that are flat, so that each rounding of a sum changes many samples."""
    logits, seeds = random(1, count, VOCAB).to(dtype), torch.arange(count)
    settings = torch.full((count,), 0.9), torch.arange(count) % 3 * 20, torch.full((count,), 0.95)

    def call(logits, seeds, temperature, top_k, top_p):
        rows = torch.arange(len(logits))
        probs = run(
            target_probs, logits, rows, temperature, top_k.int(), top_p, 0 * top_p, 1
        )  # fmt: skip
        return probs, run(target_samples, probs, rows, seeds, seeds[:, None])

    return call, [logits, seeds, *settings]


def candidates_case(run, count, dtype):
    return partial(run, top_candidates, topk=4), [random(1, count, VOCAB).to(dtype)]


def random_numbers_case(run, count, dtype):
    seeds = torch.arange(count) << 33
    return lambda seeds, at: run(philox_uniform, seeds, at, 5), [seeds, torch.arange(count).int()]


CASES = {
    name.removesuffix("_case"): case
    for name, case in globals().copy().items()
    if name.endswith("_case")
}


@by(CPU, INTERPRETER, CUDA)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")
def test_rows_of_an_op(run, name, dtype):
    if run is INTERPRETER and name == "sampling":
        pytest.skip("takes the interpreter long")
    call, rows = CASES[name](run, ROWS[run], DTYPES[dtype])
    assert differing_rows(call, rows) == []


SHAPES = (24, 40), (64, 16), (72, 300)
"""Outputs and inputs."""
THREADS = [1, 2]


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_of_a_product_on_a_cpu(shape, dtype, threads, with_threads):
    with_threads(threads)
    for x, *others in quantized_cases.plain_cases("cpu", [DTYPES[dtype]], [ROWS[CPU]], [shape]):
        assert differing_rows(lambda x, others=others: linear(x, *others), [x]) == []
    for x, *others in quantized_cases.cases("cpu", [DTYPES[dtype]], [ROWS[CPU]], [shape]):
        assert differing_rows(lambda x, others=others: quantized_linear(x, *others), [x]) == []


def test_the_norm_of_latents_has_one_launch_configuration(monkeypatch):
    """Warps share the sum of squares: with other warps it has another order."""
    options = []
    monkeypatch.setattr(
        latent_heads, "launch", lambda _kernel, _grid, _args, **others: options.append(others)
    )
    for rows in (1, 7, 300, 5000):
        call, tensors = latent_heads_case(INTERPRETER, rows, torch.bfloat16)
        call(*tensors)
    numbers = [
        {name: value for name, value in each.items() if not torch.is_tensor(value)}
        for each in options
    ]
    assert all(each | {"slots": 0} == numbers[0] | {"slots": 0} for each in numbers)


@by(CPU, INTERPRETER, CUDA)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [16, 200])
@pytest.mark.usefixtures("products_in_order")
def test_rows_of_products_by_heads(run, dtype, size):
    if run is INTERPRETER and dtype == "bfloat16":
        pytest.skip("the interpreter multiplies bfloat16 as integers")
    weight = random(1, 4, 24, size).to(DTYPES[dtype]).transpose(1, 2)
    call = lambda rows: run(multiply_heads, rows.transpose(0, 1), weight).transpose(0, 1)  # noqa: E731
    rows = random(2, ROWS[run], 4, size + 8).to(DTYPES[dtype])[..., :size]
    assert differing_rows(call, [rows]) == []
    torch.testing.assert_close(
        call(rows), torch.bmm(rows.transpose(0, 1), weight).transpose(0, 1), rtol=2e-2, atol=1e-2
    )


@pytest.fixture
def with_threads():
    """``with_threads(number)`` sets the threads of products for the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


class Trees:
    """Requests with trees over a paged pool, and each path as a chain of its own.

    Args:
        run: Of the op.
        seed: Of everything.
        dtype: Of queries, keys and values.
    """

    def __init__(self, run, seed, dtype):
        self._run = run
        generator = torch.Generator().manual_seed(seed)

        def choose(*options):
            return options[int(torch.randint(len(options), (), generator=generator))]

        self.head_dim, self.width, self.page = choose(8, 16, 64), choose(1, 3, 5, 8), choose(1, 4)
        self.kv_heads, group, self.requests = choose(1, 2), choose(1, 2, 3, 4), choose(1, 2, 5)
        self.is_latent = choose(False, False, run is not CPU)
        if self.is_latent:
            self.kv_heads, self.head_dim = 1, self.head_dim + 8
        self.heads, pages = self.kv_heads * group, 800 // self.page
        self.options = {
            "window": choose(0, 0, 7, 33, 300), "softcap": choose(0.0, 5.0),
            "sinks_N": choose(None, random(seed, self.heads)),
        }  # fmt: skip
        self.options["chunked"] = self.options["window"] > 0 and choose(False, True)
        slots = (self.requests * pages + 1) * self.page
        self.caches = [random(seed + n, slots, self.kv_heads, self.head_dim) for n in (1, 2)]
        is_float8 = dtype != torch.float32 and choose(False, run is not CPU)
        self.caches = [cache.to(FP8 if is_float8 else dtype) for cache in self.caches]
        numbers = torch.randperm(slots // self.page - 1, generator=generator) + 1
        self.table = numbers.view(self.requests, pages).int()
        self.query = random(seed + 3, self.requests, self.width, self.heads, self.head_dim)
        self.query = self.query.to(dtype)
        most = pages * self.page - self.width
        anywhere = torch.randint(0, most, (self.requests,), generator=generator).tolist()
        # Some at the borders of blocks and segments.
        self.prefix = [choose(first, 126, 190, 254, 382, 511) for first in anywhere]
        self.parents = [
            [-1] + [choose(*range(max(0, node - 3), node)) for node in range(1, self.width)]
            for _ in range(self.requests)
        ]

    def path(self, request, node):
        """Return the nodes from the root to a node."""
        path = []
        while node >= 0:
            path.insert(0, node)
            node = self.parents[request][node]
        return path

    def attended(self):
        """Return the rows of all trees, [B, W, N, D]."""
        mask = torch.zeros(self.requests, self.width, self.width, dtype=torch.bool)
        for request in range(self.requests):
            for node in range(self.width):
                mask[request, node, self.path(request, node)] = True
        lengths = torch.tensor(self.prefix).int() + self.width
        rows = self.query.flatten(0, 1)
        return self._attend(rows, self.caches, slice(None), lengths, mask).unflatten(
            0, self.query.shape[:2]
        )

    def decoded(self, request, node):
        """Return the row of a node, [N, D], as the only one of a batch, behind its path."""
        path, first = self.path(request, node), self.prefix[request]
        caches = [cache.clone() for cache in self.caches]
        for place, other in enumerate(path):
            for own, cache in zip(caches, self.caches, strict=True):
                own[self._slot(request, first + place)] = cache[self._slot(request, first + other)]
        length = torch.tensor([first + len(path)]).int()
        some = slice(request, request + 1)
        return self._attend(self.query[request, node][None], caches, some, length, None)[0]

    def _slot(self, request, place):
        return int(self.table[request, place // self.page]) * self.page + place % self.page

    def _attend(self, rows, caches, some, lengths, mask):
        width = self.width if mask is not None else 1
        begins = torch.arange(0, len(rows) + 1, width).int()
        keys, values = caches
        return self._run(
            paged_attention, rows, keys, keys[..., :-8] if self.is_latent else values,
            self.table[some], lengths, begins, mask, 0.3, self.page, width, **self.options,
        )  # fmt: skip


@by(CPU, INTERPRETER, CUDA)
@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("products_in_order")
def test_a_row_of_a_tree_has_the_bits_of_a_decode_step(run, dtype, threads, with_threads):
    if run is INTERPRETER and (threads > 1 or dtype == "bfloat16"):
        pytest.skip("the interpreter has one thread, and multiplies bfloat16 as integers")
    with_threads(threads)
    for seed in range({CPU: 12, INTERPRETER: 12, CUDA: 100}[run]):
        trees = Trees(run, seed, DTYPES[dtype])
        rows = trees.attended()
        for request in range(trees.requests):
            for node in range(trees.width):
                assert torch.equal(rows[request, node], trees.decoded(request, node)), seed


@by(INTERPRETER, CUDA)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("width", [1, 4, 9, 16, 40, 300])
@pytest.mark.usefixtures("products_in_order")
def test_a_row_of_a_chain_has_the_bits_of_a_decode_step(run, dtype, head_dim, width):
    """Wide chains cross the ends of blocks and segments, which some of their rows do not see."""
    if run is INTERPRETER and (dtype != "float32" or width > 9):
        pytest.skip("slow, and the interpreter multiplies bfloat16 as integers")
    kv_heads, group, page, prefix = 2, 4, 16, 1276 if run is CUDA else 508
    length = prefix + width
    pages = -(-length // page)
    stored = torch.bfloat16 if dtype == "float8" else DTYPES[dtype]
    caches = [random(n, pages * page, kv_heads, head_dim).to(stored) for n in (1, 2)]
    if dtype == "float8":
        caches = [cache.to(FP8) for cache in caches]
    query = random(3, width, kv_heads * group, head_dim).to(stored)
    table = torch.randperm(pages, generator=torch.Generator().manual_seed(0)).int()[None]
    attend = partial(run, paged_attention)
    lengths = (prefix + 1 + torch.arange(width)).int()
    alone = attend(
        query, *caches, table.expand(width, -1).contiguous(), lengths,
        torch.arange(width + 1).int(), None, 0.1, page, 1,
    )  # fmt: skip
    chain = attend(
        query, *caches, table, lengths[-1:], torch.tensor([0, width]).int(), None, 0.1, page, width
    )
    different = (chain != alone).flatten(1).any(1).nonzero().flatten()
    assert not len(different), different.tolist()


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [8191, 8192, 128_256, 151_937])
@pytest.mark.parametrize("topk", [1, 4, 10])
def test_candidates_of_a_large_vocabulary(vocab, topk):
    logits = torch.randn(200, vocab, device="cuda")
    assert differing_rows(partial(top_candidates, topk=topk), [logits]) == []


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or not has_dependent_launch(torch.device("cuda", 0)),
    reason="needs programmatic dependent launch, from compute capability 9.0",
)
@pytest.mark.parametrize(
    "shape",
    [
        (4096, 4096), (1024, 14336), (4096, 14336), (6144, 4096), (28672, 4096), (8, 4096),
        (128, 2880), (2880, 2880), (20_002, 2080),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("swiglu", [False, True])
@pytest.mark.parametrize("may_use_cublas", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_rows_of_a_product_on_cuda(shape, swiglu, may_use_cublas, dtype, monkeypatch):
    if not may_use_cublas:
        monkeypatch.setattr(plain_kernels, "_cublas_adds_in_order", lambda *_: False)
    for x, *others in quantized_cases.plain_cases("cuda", [DTYPES[dtype]], [1500], (shape,)):
        product = partial(call_with, linear, others, swiglu=swiglu)
        one = torch.cat([product(row[None]) for row in x[:64]])
        for rows in (5, 16, 17, 32, 33, 40, 64, 65, 96, 129, 256, 300, 513, 1024, 1500):
            assert torch.equal(product(x[:rows].flip(0)).flip(0)[: len(one)], one[:rows]), rows


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape",
    # Parts of the second have a line for each of their sums, and the last does not stream.
    [(4096, 4096), (2048, 2048), (6144, 4096), (28672, 4096), (4096, 14336), (1000, 600)],
    ids=str,
)
@pytest.mark.parametrize("swiglu", [False, True])
def test_rows_of_a_quantised_product_on_cuda(shape, swiglu):
    for x, *others in quantized_cases.cases("cuda", [torch.bfloat16], [1500], (shape,)):
        product = partial(call_with, quantized_linear, others, swiglu=swiglu)
        one = torch.cat([product(row[None]) for row in x[:64]])
        for rows in (5, 16, 17, 32, 33, 48, 64, 65, 129, 256, 257, 513, 1024, 1025, 1500):
            assert torch.equal(product(x[:rows].flip(0)).flip(0)[: len(one)], one[:rows]), rows


def call_with(op, others, x, **options):
    """Return the result of an op of rows and other arguments."""
    return op(x, *others, **options)
