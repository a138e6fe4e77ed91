"""The largest logits of rows, bitmasks and processors: ties, parts of rows, large vocabularies."""

from __future__ import annotations

import math

import pytest
import torch

from graphkit.ops.kernels import logits as kernels
from graphkit.ops.logits import apply_token_bitmask, argmax_rows, top_candidates
from graphkit.ops.processors import process_logits
from graphkit.ops.target_probs import target_probs
from op_devices import INTERPRETER, by, on_cuda
from step_cases import results

of_numpy = pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")
VOCABS = [8191, 8192, 128_256, 151_937]


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(kernels, "MAX_BLOCK", 64)
    monkeypatch.setattr(kernels, "LEAST_PART", 32)


def best_of(run, rows, index=None, token_map=None):
    """Run ``argmax_rows``; return its tokens and the number of parts of each row."""
    tokens = torch.full((len(rows) if index is None else len(index),), -7)
    run(argmax_rows, tokens, rows, index, token_map)
    part = kernels.argmax_part(len(tokens), rows.shape[1])
    return tokens, -(-rows.shape[1] // part)


@by(INTERPRETER)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("vocab", "parts"), [(191, 1), (192, 1), (193, 7), (257, 9), (640, 20)])
def test_the_first_largest_of_rows_in_parts(run, vocab, parts, dtype, small_blocks):
    """Ties within a part and across parts, in the first and the last column, NaN and infinities."""
    torch.manual_seed(vocab)
    rows = torch.randn(9, vocab).to(dtype)
    rows[0] = 0
    rows[1] = -torch.inf
    rows[2, [vocab - 1, vocab // 2, 33]] = 9
    rows[3, [31, 32]] = 9
    rows[4, vocab - 1] = torch.inf
    rows[5, vocab // 2 :: 50], rows[5, 3] = torch.nan, torch.inf
    rows[6, [vocab - 1, 64]] = torch.nan
    rows[7], rows[7, vocab - 1] = -torch.inf, -3e38
    rows[8, [40, 170]] = torch.tensor([0.0, -0.0], dtype=dtype) + 0
    rows[8, :40], rows[8, 41:170], rows[8, 171:] = -1, -1, -1
    index, token_map = torch.tensor([8, 0, 0, 5, 3, 2]), torch.randperm(vocab)
    assert best_of(run, rows)[1] == parts
    assert torch.equal(best_of(run, rows)[0], rows.argmax(-1))
    assert torch.equal(best_of(run, rows, index)[0], rows[index].argmax(-1))
    assert torch.equal(best_of(run, rows, index, token_map)[0], token_map[rows[index].argmax(-1)])


@by(INTERPRETER)
@pytest.mark.parametrize(("rows", "parts"), [(1, 22), (9, 11), (16, 6), (40, 3), (60, 2), (300, 1)])
def test_parts_have_more_columns_for_more_rows(run, rows, parts, small_blocks, monkeypatch):
    """A part of several blocks may end behind the last column."""
    monkeypatch.setattr(kernels, "MOST_PROGRAMS", 130)
    values = torch.randint(0, 50, (rows, 701)).float()
    tokens, number = best_of(run, values)
    assert number == parts
    assert torch.equal(tokens, values.argmax(-1))


@pytest.mark.parametrize(
    ("rows", "vocab", "parts"),
    [
        (1, 128_256, 63), (6, 128_256, 32), (16, 128_256, 16), (48, 128_256, 4),
        (132, 128_256, 2), (133, 128_256, 1), (8, 32_000, 16), (16, 32_000, 16), (66, 32_000, 4),
        (67, 32_000, 1), (1, 24_576, 1), (1, 24_577, 13), (0, 128_256, 63), (300, 128_256, 1),
    ],
)  # fmt: skip
def test_parts_of_real_vocabularies(rows, vocab, parts):
    """Up to two programs per multiprocessor, unless few reads are saved."""
    assert -(-vocab // kernels.argmax_part(rows, vocab)) == parts


@of_numpy
@by(INTERPRETER)
@pytest.mark.parametrize("vocab", [9, 64, 65, 300])
@pytest.mark.parametrize("topk", [1, 2, 9])
def test_equal_candidates_are_in_the_order_of_their_ids(run, vocab, topk, small_blocks):
    """Up to 64 tokens are one part. Others have parts of 32, the last of which may have 1 token."""
    torch.manual_seed(vocab)
    logits = torch.randint(0, 3, (6, vocab)).float()
    logits[3], logits[4, (topk + 1) // 2 :] = 0, -torch.inf
    logits[5], logits[5, 5 % vocab :: 64] = -1, 1
    probs, tokens = run(top_candidates, logits, topk)
    want = logits.sort(dim=1, descending=True, stable=True).indices[:, :topk]
    assert torch.equal(tokens, want)
    torch.testing.assert_close(probs, logits.softmax(1).gather(1, want))
    logits[:, 1] = torch.nan
    probs, tokens = run(top_candidates, logits, topk)
    assert probs.isnan().all()
    assert 0 <= tokens.min() <= tokens.max() < vocab


@of_numpy
@by(INTERPRETER)
@pytest.mark.parametrize("vocab", [40, 300])
def test_candidates_of_rows_without_a_finite_sum(run, vocab, small_blocks):
    """The tokens are those of the largest scores, and NaN counts as -inf."""
    rows = torch.zeros(4, vocab)
    rows[0] = -torch.inf
    rows[1, vocab - 2] = torch.inf
    rows[2, 3] = torch.nan
    rows[3] = torch.nan
    probs, tokens = run(top_candidates, rows, 3)
    assert probs.isnan().all()
    assert tokens.tolist() == [[0, 1, 2], [vocab - 2, 0, 1], [0, 1, 2], [0, 1, 2]]


@of_numpy
@by(INTERPRETER)
@pytest.mark.parametrize("vocab", [40, 300])
def test_candidates_of_rows_with_few_finite_scores(run, vocab, small_blocks):
    """Parts without a finite score count nothing."""
    rows = torch.full((2, vocab), -torch.inf)
    rows[0, [5, 37]], rows[1, 39] = torch.tensor([0.0, math.log(3)]), -1
    probs, tokens = run(top_candidates, rows, 4)
    torch.testing.assert_close(probs, torch.tensor([[0.75, 0.25, 0, 0], [1, 0, 0, 0]]))
    assert tokens.tolist() == [[37, 5, 0, 1], [39, 0, 1, 2]]


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_first_of_equal_largest_values_in_a_large_vocabulary(vocab, dtype):
    torch.manual_seed(vocab)
    logits = torch.randint(0, 9, (64, vocab)).to(dtype)
    logits[:20] = torch.randn(20, vocab).to(dtype)
    logits[30, vocab // 2 :: 7] = torch.nan
    logits[31] = -torch.inf
    logits[32, vocab - 1] = torch.inf
    logits[33, [vocab // 3, vocab - 2]] = 99
    index = torch.randint(0, 64, (40,))
    for rows in (None, index):
        tokens = torch.empty(64 if rows is None else 40, dtype=torch.int64)
        ours = tokens.cuda()
        argmax_rows(tokens, logits, rows)
        argmax_rows(ours, logits.cuda(), None if rows is None else rows.cuda())
        assert torch.equal(ours.cpu(), tokens)
    assert torch.equal(ours, logits.cuda().argmax(-1)[index.cuda()])
    token_map = torch.randperm(vocab)
    argmax_rows(tokens, logits, index, token_map)
    argmax_rows(ours, logits.cuda(), index.cuda(), token_map.cuda())
    assert torch.equal(ours.cpu(), tokens)


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("topk", [1, 4, 10])
def test_candidates_of_a_large_vocabulary(vocab, topk):
    """Of equal logits, also of -inf, the smaller id is first."""
    torch.manual_seed(vocab)
    logits = torch.stack([torch.randperm(vocab) for _ in range(12)]) / 9000
    logits[6:] = torch.randint(0, 1000, (6, vocab)) / 200
    logits[7] = 0
    logits[8, (topk + 1) // 2 :] = -torch.inf
    logits[9], logits[9, 5::8192] = -1, 1
    logits[10], logits[10, 2040:2056] = -1, 1  # at the border of two parts
    temperature = torch.linspace(0.5, 2, 9)
    index = torch.tensor([3, 0, 10, 8, 7, 6, 5, 9, 1])
    probs, tokens = top_candidates(*on_cuda([logits, topk, temperature, index]))
    rows = logits[index] / temperature[:, None]
    want = rows.sort(dim=1, descending=True, stable=True).indices[:, :topk]
    assert torch.equal(tokens.cpu(), want)
    token_map = torch.randperm(vocab)
    mapped = top_candidates(*on_cuda([logits, topk, temperature, index, token_map]))
    assert torch.equal(mapped[0], probs)
    assert torch.equal(mapped[1].cpu(), token_map[want])
    torch.testing.assert_close(probs.cpu(), rows.softmax(1).gather(1, want), rtol=1e-4, atol=1e-12)


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bitmasks_of_a_large_vocabulary(vocab, dtype):
    torch.manual_seed(vocab)
    logits = torch.randn(40, vocab).to(dtype)
    logits[3, ::5] = torch.nan
    bitmask = torch.randint(-(2**31), 2**31, (40, -(-vocab // 32)), dtype=torch.int32)
    bitmask[7] = -1
    ours = logits.cuda()
    apply_token_bitmask(ours, bitmask.cuda())
    apply_token_bitmask(logits, bitmask)
    torch.testing.assert_close(ours.cpu(), logits, rtol=0, atol=0, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_processors_of_a_large_vocabulary(vocab, dtype):
    """All kinds of processors, over chains and trees; biases and stop tokens in several parts."""
    torch.manual_seed(vocab)
    requests, width, size, ids = 6, 5, 9, 1024
    logits = torch.randn(requests * width, vocab).mul(8).to(dtype)
    biased = torch.stack([torch.randperm(vocab)[:ids] for _ in range(size)]).int()
    biased[:, 700:] = -1
    biases = torch.randn(size, ids)
    biases[:, ::5] = -torch.inf
    counts = torch.randint(0, 3, (size, vocab)).int()
    candidates = torch.randint(0, 9, (requests, width))
    mask = torch.rand(requests, width, width) < 0.5
    mask |= torch.eye(width, dtype=torch.bool)
    args = [
        logits, torch.tensor([3, 0, 8, 1, 5, 2]), candidates, mask,
        torch.randint(0, 9, (requests * width,)),
        torch.tensor([0, 15, 7, 1, 2, 4, 8, 0, 3]).int(), counts,
        torch.rand(size, 3) + 0.5, biased, biases, torch.randint(0, 12, (size,)).int(),
        torch.randint(-1, vocab, (size, 16)),
    ]  # fmt: skip
    for tree_mask in (None, mask):
        args[3] = tree_mask
        ours = on_cuda(args)
        got = results(process_logits, process_logits(*ours), ours)
        want = results(process_logits, process_logits(*args), args)
        for one, other in zip(got, want, strict=True):
            torch.testing.assert_close(one.cpu(), other, rtol=1e-5, atol=1e-4)
        alone = [torch.cat([each] * 2) if place < 5 and each is not None else each
                 for place, each in enumerate(ours)]  # fmt: skip
        twice = results(process_logits, process_logits(*alone), alone)
        for one, other in zip(got, twice, strict=True):
            assert torch.equal(one, other[: len(one)]), "a row depends on the others"


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_processed_rows_replace_logits_of_a_large_vocabulary(vocab, dtype):
    """A row has the same bits whether other rows are replaced or not."""
    torch.manual_seed(vocab)
    rows = 12
    logits, processed = torch.randn(rows, vocab).mul(3).to(dtype), torch.randn(rows, vocab) * 3
    flags = torch.arange(rows) % 3 == 0
    tokens = torch.empty(rows, dtype=torch.int64, device="cuda")
    ours = on_cuda([logits, processed, flags])
    argmax_rows(tokens, ours[0], processed=ours[1], is_processed=ours[2])
    assert torch.equal(tokens.cpu(), torch.where(flags[:, None], processed, logits).argmax(1))
    filters = (
        torch.full((rows,), 0.8), torch.tensor([0, 50, 0, 20] * 3).int(),
        torch.tensor([1.0, 1.0, 0.9, 0.9] * 3), torch.tensor([0.0, 0.0, 0.0, 0.01] * 3),
    )  # fmt: skip
    index = torch.arange(rows)
    given = on_cuda((index, *filters))
    probs = target_probs(ours[0], *given, 1, ours[1], ours[2])
    none, every = torch.zeros_like(ours[2]), torch.ones_like(ours[2])
    plain, own = (target_probs(ours[0], *given, 1, ours[1], flag) for flag in (none, every))
    assert torch.equal(probs, torch.where(ours[2][:, None], own, plain))


def test_a_bitmask_applies_to_a_view_of_the_logits():
    logits = torch.zeros(4, 80)
    apply_token_bitmask(logits[::2, 1::2], torch.tensor([[-1, -1], [5, 0]], dtype=torch.int32))
    refused = (logits == -torch.inf).nonzero().tolist()
    assert refused == [[2, 1 + 2 * token] for token in range(40) if token not in (0, 2)]
