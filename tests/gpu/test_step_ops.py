"""The ops of a whole step on CUDA against their torch references, eager and in captured graphs."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch

from graphkit.ops.logits import apply_token_bitmask, argmax_rows, top_candidates
from graphkit.ops.processors import process_logits
from graphkit.ops.rejection import accept_by_rejection
from graphkit.ops.sampling import target_samples
from graphkit.ops.target_probs import target_probs
from sanitized import sanitized

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CASES, results, assert_equal = map(
    runpy.run_path(str(Path(__file__).parents[1] / "unit" / "ops" / "step_cases.py")).get,
    ("CASES", "results", "assert_equal"),
)
VOCABS = [8191, 8192, 128_256, 151_937]


def on_device(args):
    return [each.cuda() if isinstance(each, torch.Tensor) else each for each in args]


def facts(args):
    """What a graph has captured: shapes, dtypes and numbers."""
    return [(a.shape, a.dtype) if isinstance(a, torch.Tensor) else a for a in args]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("requests", [*sanitized(0, 1, 3), 64, 300])
def test_op_matches_the_reference(name, requests):
    op, make, _ = CASES[name]
    for seed in range(12):
        args = make(requests, seed)
        ours = on_device(args)
        got = results(op, op(*ours), ours)
        assert all(each.is_cuda for each in got)
        assert_equal(got, results(op, op(*args), args))


@pytest.mark.parametrize("name", CASES)
def test_a_graph_replays_on_new_values(name):
    op, make, _ = CASES[name]
    first = make(8, 3)
    others = (make(8, seed) for seed in range(4, 2000))
    later = next(args for args in others if facts(args) == facts(first))
    ours = on_device(first)
    op(*on_device(first))
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        returned = op(*ours)
    for args in (later, first):
        for each, new in zip(ours, args, strict=True):
            if isinstance(each, torch.Tensor):
                each.copy_(new)
        graph.replay()
        again = [each.clone() if isinstance(each, torch.Tensor) else each for each in args]
        assert_equal(results(op, returned, ours), results(op, op(*again), again))


@pytest.mark.parametrize("name", CASES)
def test_few_launches(name):
    """One, but for ``target_probs``, whose rows several programs share at any size."""
    op, make, _ = CASES[name]
    kernels = {
        target_probs: ["scan_logits_kernel", "select_weights_kernel", "write_probs_kernel"]
    }.get(op, [f"{op.__name__}_kernel"])
    args = on_device(make(8, 2))
    op(*args)
    torch.cuda.synchronize()
    cuda = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=cuda, acc_events=True) as profile:
        op(*args)
        torch.cuda.synchronize()
    launched = [event.name for event in profile.events() if event.device_type.name == "CUDA"]
    assert [each for each in launched if each.endswith("_kernel")] == kernels
    assert not [each for each in launched if each.startswith(("Mem", "void"))]


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


@pytest.mark.parametrize("vocab", [24_577, 32_000, 128_256])
@pytest.mark.parametrize("rows", [1, 6, 40, 132, 300])
def test_a_graph_joins_the_parts_of_rows(rows, vocab):
    """Equal values, NaN and -inf in several parts. Nothing is left of the replay before."""
    logits = torch.zeros(rows, vocab, dtype=torch.bfloat16, device="cuda")
    tokens = torch.empty(rows, dtype=torch.int64, device="cuda")
    argmax_rows(tokens, logits)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        argmax_rows(tokens, logits)
    torch.manual_seed(vocab)
    for fill in (0, -torch.inf, 1):
        values = torch.randint(0, 9, (rows, vocab)).bfloat16()
        values[::3] = fill
        values[1::3, [vocab - 1, vocab // 2, 5000]] = 9
        values[2::6, vocab // 3 :: 999] = torch.nan
        values[5::6] = -torch.inf
        values[5::6, vocab - 1] = -3
        logits.copy_(values)
        for _ in range(3):
            tokens.fill_(-1)
            graph.replay()
            assert torch.equal(tokens.cpu(), values.argmax(-1))


@pytest.mark.parametrize("rows", [1, 6, 40])
def test_rows_in_parts_take_two_launches(rows):
    logits = torch.randn(rows, 128_256, device="cuda").bfloat16()
    tokens = torch.empty(rows, dtype=torch.int64, device="cuda")
    cuda = [torch.profiler.ProfilerActivity.CUDA]
    for op, args in ((argmax_rows, (tokens, logits)), (top_candidates, (logits, 4))):
        op(*args)
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=cuda, acc_events=True) as profile:
            op(*args)
            torch.cuda.synchronize()
        launched = [event.name for event in profile.events() if event.device_type.name == "CUDA"]
        join = "join_argmax_kernel" if op is argmax_rows else "join_candidates_kernel"
        assert [each for each in launched if each.endswith("_kernel")] == [
            f"{op.__name__}_kernel", join,
        ]  # fmt: skip


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("topk", [1, 4, 10])
def test_candidates_do_not_depend_on_the_other_rows(vocab, topk):
    """Bit by bit, since the parts of a row depend on its columns alone."""
    logits = torch.randn(200, vocab, device="cuda")
    probs, tokens = top_candidates(logits, topk)
    for some in (slice(1), slice(7, 13), slice(150)):
        few = top_candidates(logits[some], topk)
        assert torch.equal(few[0], probs[some])
        assert torch.equal(few[1], tokens[some])


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
    probs, tokens = top_candidates(*on_device([logits, topk, temperature, index]))
    rows = logits[index] / temperature[:, None]
    want = rows.sort(dim=1, descending=True, stable=True).indices[:, :topk]
    assert torch.equal(tokens.cpu(), want)
    token_map = torch.randperm(vocab)
    mapped = top_candidates(*on_device([logits, topk, temperature, index, token_map]))
    assert torch.equal(mapped[0], probs)
    assert torch.equal(mapped[1].cpu(), token_map[want])
    torch.testing.assert_close(probs.cpu(), rows.softmax(1).gather(1, want), rtol=1e-4, atol=1e-12)


@pytest.mark.parametrize("vocab", VOCABS)
def test_distributions_over_a_large_vocabulary(vocab):
    torch.manual_seed(vocab)
    logits, rows = torch.randn(12, vocab) * 4, torch.tensor([2, 0, 1, 3])
    temperatures = torch.tensor([1.0, 0.0, 0.2, 1e-44])
    filters = torch.zeros(4, dtype=torch.int32), torch.ones(4), torch.zeros(4)
    probs = target_probs(*on_device([logits, rows, temperatures, *filters]), 3)
    want = target_probs(logits, rows, temperatures, *filters, 3)
    torch.testing.assert_close(probs.cpu(), want, rtol=1e-4, atol=1e-9)
    assert torch.equal(probs[3:6].sum(1).cpu() > 0.999, torch.ones(3, dtype=torch.bool))
    assert torch.equal(probs[6:9].cpu(), want[6:9]), "temperature 0 is exact"


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
    probs = target_probs(*on_device([logits, *settings]), 2).cpu()
    want = target_probs(logits, *settings, 2)
    assert (probs - want).abs().sum(1).max() < 1e-4
    more = (probs > 0).sum(1) - (want > 0).sum(1)
    assert more[:10].eq(0).all(), "no sum decides"
    assert more.abs().max() <= 1
    again = target_probs(*on_device([logits[12:14], rows[6:7], *settings[1:]]), 2)
    assert torch.equal(again.cpu(), probs[12:14]), "no other row takes part"


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
    probs, want = target_probs(*on_device(args)).cpu(), target_probs(*args)
    torch.testing.assert_close(probs.sum(1), torch.ones(48), rtol=1e-4, atol=0)
    top_p_decides = (top_ps < 1) & (want.gt(0).sum(1) > 1)
    exact = ~top_p_decides
    torch.testing.assert_close(probs[exact], want[exact], rtol=1e-4, atol=1e-9)
    assert ((probs - want).abs().sum(1) < 0.02).all()
    again = target_probs(*on_device([logits[7:9], rows[7:9], *args[2:]]))
    assert torch.equal(again.cpu(), probs[7:9]), "no other row takes part"


@pytest.mark.parametrize("vocab", VOCABS)
def test_certain_tokens_of_a_large_vocabulary_are_drawn(vocab):
    requests, width = 33, 4
    torch.manual_seed(vocab)
    tokens = torch.randint(0, vocab, (requests * width,))
    probs = torch.zeros(requests * width, vocab).scatter_(1, tokens[:, None], 1.0)
    rows, positions = torch.arange(requests), torch.arange(requests * width).view(-1, width)
    drawn = target_samples(*on_device((probs, rows, rows * 2**33, positions)))
    assert torch.equal(drawn.cpu(), tokens)


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
    assert_equal([target_samples(*on_device(args))], [target_samples(*args)])


@pytest.mark.parametrize("vocab", VOCABS)
def test_samples_do_not_depend_on_the_other_rows(vocab):
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
    got = accept_by_rejection(*on_device(args))
    assert_equal(got, accept_by_rejection(*args))
    assert 0 < (got[2] > 0).sum() < requests, "some drafts are accepted, some are not"


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
        ours = on_device(args)
        got = results(process_logits, process_logits(*ours), ours)
        want = results(process_logits, process_logits(*args), args)
        for one, other in zip(got, want, strict=True):
            torch.testing.assert_close(one.cpu(), other, rtol=1e-5, atol=1e-4)
        alone = [torch.cat([each] * 2) if place < 5 and each is not None else each
                 for place, each in enumerate(ours)]  # fmt: skip
        twice = results(process_logits, process_logits(*alone), alone)
        for one, other in zip(got, twice, strict=True):
            assert torch.equal(one, other[: len(one)]), "a row depends on the others"


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_processed_rows_replace_logits_of_a_large_vocabulary(vocab, dtype):
    """A row has the same bits whether other rows are replaced or not."""
    torch.manual_seed(vocab)
    rows = 12
    logits, processed = torch.randn(rows, vocab).mul(3).to(dtype), torch.randn(rows, vocab) * 3
    flags = torch.arange(rows) % 3 == 0
    tokens = torch.empty(rows, dtype=torch.int64, device="cuda")
    ours = on_device([logits, processed, flags])
    argmax_rows(tokens, ours[0], processed=ours[1], is_processed=ours[2])
    assert torch.equal(tokens.cpu(), torch.where(flags[:, None], processed, logits).argmax(1))
    filters = (
        torch.full((rows,), 0.8), torch.tensor([0, 50, 0, 20] * 3).int(),
        torch.tensor([1.0, 1.0, 0.9, 0.9] * 3), torch.tensor([0.0, 0.0, 0.0, 0.01] * 3),
    )  # fmt: skip
    index = torch.arange(rows)
    given = on_device((index, *filters))
    probs = target_probs(ours[0], *given, 1, ours[1], ours[2])
    none, every = torch.zeros_like(ours[2]), torch.ones_like(ours[2])
    plain, own = (target_probs(ours[0], *given, 1, ours[1], flag) for flag in (none, every))
    assert torch.equal(probs, torch.where(ours[2][:, None], own, plain))
