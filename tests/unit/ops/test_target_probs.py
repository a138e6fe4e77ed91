"""Distributions and samples: filters, rounding, large vocabularies, independence of other rows."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch

from graphkit.ops.kernels import target_probs as kernels
from graphkit.ops.rejection import accept_by_rejection
from graphkit.ops.sampling import target_samples
from graphkit.ops.target_probs import target_probs
from op_devices import INTERPRETER, by, on_cuda
from step_cases import assert_equal

VOCABS = [8191, 8192, 128_256, 151_937]
INT = torch.zeros(2, dtype=torch.int64)
of_numpy = pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")


@pytest.fixture
def small_blocks(monkeypatch):
    for name, size in {"CHUNK": 128, "TILE": 64, "BLOCK": 128, "WRITERS": 10}.items():
        monkeypatch.setattr(kernels, name, size)


@of_numpy
@by(INTERPRETER)
@pytest.mark.parametrize("is_tied", [False, True])
def test_every_combination_of_filters(run, is_tied, small_blocks):
    """The sums of tied weights are the same in any order, so that no rounding decides."""
    torch.manual_seed(5)
    logits = torch.randint(0, 3, (12, 99)) * math.log(2) if is_tied else torch.randn(12, 99)
    filters = list(product([0, 1, 20], [1.0, 0.7], [0.0, 0.1]))
    top_ks, top_ps, min_ps = (torch.tensor(each) for each in zip(*filters, strict=True))
    rows = torch.arange(12)
    args = logits, rows, torch.ones(12), top_ks.int(), top_ps, min_ps, 1
    assert_equal([run(target_probs, *args)], [target_probs(*args)])


@of_numpy
@by(INTERPRETER)
@pytest.mark.parametrize("filters", [(2, 1.0, 0.0), (0, 0.9, 0.0), (2, 0.5, 0.5), (0, 1.0, 1.0)])
def test_rounding_makes_weights_of_different_logits_equal(run, filters, small_blocks):
    """All pass then, in all chunks and on both sides of each sampled bound."""
    logits = torch.randn(1, 300, generator=torch.Generator().manual_seed(1))
    row, (top_k, top_p, min_p) = torch.zeros(1), filters
    args = logits, row.long(), row + 1e30, row.int() + top_k, row + top_p, row + min_p, 1
    torch.testing.assert_close(run(target_probs, *args), torch.full((1, 300), 1 / 300))


@pytest.mark.parametrize("filters", [(0, 1.0, 0.0), (50, 1.0, 0.0), (0, 0.9, 0.0), (0, 1.0, 0.01)])
def test_samples_do_not_depend_on_the_other_rows(filters):
    """Bit by bit, with several threads, which may share the work of a single row."""
    threads, vocab = torch.get_num_threads(), 70_000
    logits = torch.randn(8, vocab, generator=torch.Generator().manual_seed(0))
    seeds, positions = INT[:1] + 5, torch.arange(8).view(2, 4)
    temperature, top_k, top_p, min_p = (torch.tensor([number]) for number in (1.5, *filters))
    settings = temperature, top_k.int(), top_p, min_p

    def drawn(some, width):
        rows = torch.zeros(some.numel() // width, dtype=torch.int64)
        probs = target_probs(logits[some], rows, *settings, width)
        return probs, target_samples(probs, rows, seeds, some.view(-1, width))

    torch.set_num_threads(2)
    try:
        together = drawn(positions.flatten(), 4)
        alone = [drawn(each, 1) for each in positions.flatten()[:, None]]
    finally:
        torch.set_num_threads(threads)
    for one, other in zip(together, zip(*alone, strict=True), strict=True):
        assert torch.equal(one, torch.cat(other))


def test_a_sample_is_never_a_token_of_probability_0():
    """Even where the running sum reaches the largest sample only with the last token."""
    probs = torch.zeros(50_000, 9)
    probs[:, 3], probs[:, 5] = 1e-30, 3e-30
    rows = torch.arange(50_000)
    drawn = target_samples(probs, rows, rows, rows[:, None])
    assert set(drawn.tolist()) == {3, 5}
    assert drawn.float().mean().sub(4.5).abs() < 0.02


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", VOCABS)
def test_distributions_over_a_large_vocabulary(vocab):
    torch.manual_seed(vocab)
    logits, rows = torch.randn(12, vocab) * 4, torch.tensor([2, 0, 1, 3])
    temperatures = torch.tensor([1.0, 0.0, 0.2, 1e-44])
    filters = torch.zeros(4, dtype=torch.int32), torch.ones(4), torch.zeros(4)
    probs = target_probs(*on_cuda([logits, rows, temperatures, *filters]), 3)
    want = target_probs(logits, rows, temperatures, *filters, 3)
    torch.testing.assert_close(probs.cpu(), want, rtol=1e-4, atol=1e-9)
    assert torch.equal(probs[3:6].sum(1).cpu() > 0.999, torch.ones(3, dtype=torch.bool))
    assert torch.equal(probs[6:9].cpu(), want[6:9]), "temperature 0 is exact"


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [*VOCABS, 262_144])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_filters_of_a_large_vocabulary(vocab, dtype):
    """Rounding of a sum may choose the next bound of top_p, which one token separates."""
    torch.manual_seed(vocab)
    top_ks = torch.tensor([0, 1, 40, 5000, vocab + 1, 0, 40, 5000, 0, 0], dtype=torch.int32)
    top_ps = torch.tensor([1, 1, 1, 1, 1, 0.9, 0.8, 0.99, 1e-50, 1])
    min_ps = torch.tensor([0, 0, 0, 0, 0, 0, 0, 0.001, 0, 0.02])
    rows, temperatures = torch.arange(10), torch.linspace(0.5, 1.5, 10)
    logits = (torch.randn(20, vocab) * 3).to(dtype)
    settings = rows, temperatures, top_ks, top_ps, min_ps
    probs = target_probs(*on_cuda([logits, *settings]), 2).cpu()
    want = target_probs(logits, *settings, 2)
    assert (probs - want).abs().sum(1).max() < 1e-4
    more = (probs > 0).sum(1) - (want > 0).sum(1)
    assert more[:10].eq(0).all(), "no sum decides"
    assert more.abs().max() <= 1
    again = target_probs(*on_cuda([logits[12:14], rows[6:7], *settings[1:]]), 2)
    assert torch.equal(again.cpu(), probs[12:14]), "no other row takes part"


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("temperature", [1.0, 1e30])
def test_filters_of_masked_flat_and_peaked_rows(vocab, temperature):
    """Few finite logits, equal ones, and one that has nearly all probability."""
    torch.manual_seed(vocab)
    logits = torch.randn(48, vocab)
    logits[:16].masked_fill_(torch.rand(16, vocab) < 0.999, -torch.inf)
    logits[:16, vocab - 1] = 1
    logits[16:32], logits[32:, vocab // 2] = 0, 40
    filters = torch.tensor([[0, 1, 30, 9000] * 4, [1, 0.9, 1, 0.5] * 4, [0] * 8 + [0.1] * 8])
    top_ks, top_ps, min_ps = filters.repeat(1, 3)
    rows, temperatures = torch.arange(48), torch.full((48,), temperature)
    args = logits, rows, temperatures, top_ks.int(), top_ps, min_ps, 1
    probs, want = target_probs(*on_cuda(args)).cpu(), target_probs(*args)
    torch.testing.assert_close(probs.sum(1), torch.ones(48), rtol=1e-4, atol=0)
    top_p_decides = (top_ps < 1) & (want.gt(0).sum(1) > 1)
    exact = ~top_p_decides
    torch.testing.assert_close(probs[exact], want[exact], rtol=1e-4, atol=1e-9)
    assert ((probs - want).abs().sum(1) < 0.02).all()
    again = target_probs(*on_cuda([logits[7:9], rows[7:9], *args[2:]]))
    assert torch.equal(again.cpu(), probs[7:9]), "no other row takes part"


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", VOCABS)
def test_certain_tokens_of_a_large_vocabulary_are_drawn(vocab):
    requests, width = 33, 4
    torch.manual_seed(vocab)
    tokens = torch.randint(0, vocab, (requests * width,))
    probs = torch.zeros(requests * width, vocab).scatter_(1, tokens[:, None], 1.0)
    rows, positions = torch.arange(requests), torch.arange(requests * width).view(-1, width)
    drawn = target_samples(*on_cuda((probs, rows, rows * 2**33, positions)))
    assert torch.equal(drawn.cpu(), tokens)


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", VOCABS)
def test_samples_of_a_large_vocabulary(vocab):
    """Distributions over twelve tokens in multiples of 1/64, so that no rounding decides."""
    requests, width = 64, 8
    torch.manual_seed(vocab)
    words = torch.randint(0, vocab, (12,))
    words[0], words[1] = 0, vocab - 1
    probs = torch.zeros(requests * width, vocab)
    drawn = words[torch.randint(0, 12, (requests * width, 64))]
    probs.scatter_add_(1, drawn, torch.full(drawn.shape, 1 / 64))
    rows, positions = torch.arange(requests), torch.randint(0, 10**6, (requests, width))
    args = probs, rows, rows * 2**33, positions
    assert_equal([target_samples(*on_cuda(args))], [target_samples(*args)])


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", VOCABS)
def test_samples_of_a_large_vocabulary_do_not_depend_on_the_other_rows(vocab):
    """Bit by bit, in flat distributions, where each rounding of a sum changes many samples."""
    torch.manual_seed(vocab)
    logits, nodes = torch.randn(256, vocab, device="cuda") / 4, torch.arange(256, device="cuda")
    seeds, one = torch.tensor([7], device="cuda"), torch.ones(1, device="cuda")
    drawn = []
    for width, count in ((1, 256), (1, 8), (4, 64), (16, 16), (16, 128), (3, 9)):
        samples = []
        for some in nodes.split(count):
            rows = torch.zeros(-(-len(some) // width), dtype=torch.int64, device="cuda")
            padded = some[torch.arange(len(rows) * width, device="cuda").clamp(max=len(some) - 1)]
            settings = rows, one, one.int() * 0, one, one * 0, width
            probs = target_probs(logits[padded], *settings)
            tokens = target_samples(probs, rows, seeds, padded.view(-1, width))
            samples.append(tokens[: len(some)])
        drawn.append(torch.cat(samples))
    assert all(torch.equal(drawn[0], other) for other in drawn[1:])
    assert len(drawn[0].unique()) > 200


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("is_chain", [True, False])
def test_sampled_drafts_of_a_large_vocabulary(vocab, is_chain):
    """Distributions over twelve tokens in multiples of 1/64, so that no rounding decides."""
    requests, width = 32, 4
    torch.manual_seed(vocab)
    words = torch.randint(0, vocab, (12,))
    words[0], words[1] = 0, vocab - 1
    drawn = words[torch.randint(0, 12, (2, requests * width, 64))]
    share = torch.full((requests * width, 64), 1 / 64)
    target, draft = (torch.zeros(len(share), vocab).scatter_add_(1, each, share) for each in drawn)
    candidates = words[torch.randint(0, 12, (requests, width))]
    chain, alone = torch.tensor([1, 2, 3, -1]), torch.full((width,), -1)
    links = (chain, alone) if is_chain else (alone.clone(), torch.tensor([-1, 2, 3, -1]))
    links[0][0] = 1
    rows = torch.arange(requests)
    args = (
        candidates, *(each.repeat(requests, 1) for each in links), target, draft, rows,
        rows * 2**33, rows.int(), width,
    )  # fmt: skip
    got = accept_by_rejection(*on_cuda(args))
    assert_equal(got, accept_by_rejection(*args))
    assert 0 < (got[2] > 0).sum() < requests, "some drafts are accepted, some are not"
