"""finish_step on every device: new tokens, ends and states, against a model in plain Python."""

from __future__ import annotations

from random import Random

import pytest
import torch

from graphkit.errors import InputError
from graphkit.ops.loop_layout import NO_LOGPROB, Report, RequestEnd
from graphkit.ops.processors import Kind
from graphkit.ops.step_state import finish_step
from op_devices import by_each, on_cuda
from sanitized import sanitized

RUNNING, STOP, LENGTH = RequestEnd


def finish_case(requests, *, seed, longest=4, width=None, stops=3, dtype=torch.int64):
    """Return random arguments of ``finish_step``; many requests are pads or have ended."""
    random = Random(seed)
    rows = random.sample(range(1, requests + 3), requests)
    rows = torch.tensor([row if random.random() < 0.8 else 0 for row in rows], dtype=torch.int64)
    vocabulary = [*range(8), 128_255, 2**31 - 1]  # few, so that many tokens are stop tokens
    size = (width or longest) * requests
    left = [random.choice([0, random.randint(1, 2 * longest), 1000]) for _ in range(requests + 3)]
    return [
        rows,
        torch.tensor([random.choice(vocabulary) for _ in range(size)], dtype=dtype),
        torch.tensor([random.randint(1, longest) for _ in rows], dtype=torch.int32),
        torch.tensor([[random.choice([-1, -1, *vocabulary]) for _ in range(stops)] for _ in left]),
        torch.tensor([random.randint(1, 500) for _ in left], dtype=torch.int32),
        torch.tensor([random.choice(vocabulary) for _ in left]),
        torch.tensor(left, dtype=torch.int32),
        longest,
    ]


def finished(rows, predict, accepted, stop_ids, seq_lens, bonus, remaining, longest):
    """Return the report of ``finish_step`` and its three states, as lists."""
    tokens_of = predict.view(len(rows), -1).tolist() if len(rows) else []
    stop_ids, accepted = stop_ids.tolist(), accepted.tolist()
    seq_lens, bonus, remaining = seq_lens.tolist(), bonus.tolist(), remaining.tolist()
    report = []
    for row, tokens, count in zip(rows.tolist(), tokens_of, accepted, strict=True):
        new, end = [], RequestEnd.RUNNING
        if row == 0 or remaining[row] == 0:
            report.append([0, 0, 0, end, 0] + [-1] * longest)
            continue
        for token in tokens[:count]:
            new.append(token)
            if token in stop_ids[row]:
                end = RequestEnd.STOP
            elif len(new) == remaining[row]:
                end = RequestEnd.LENGTH
            if end:
                break
        report.append([row, count, len(new), end, 0, *new] + [-1] * (longest - len(new)))
        seq_lens[row] += count
        bonus[row] = tokens[count - 1]
        remaining[row] = 0 if end else remaining[row] - len(new)
    return report, seq_lens, bonus, remaining


def scored_case(requests, seed, longest=4):
    """Return ``finish_case`` of 9 tokens, with counts and log-probabilities of the tokens."""
    width, vocab, random = longest + seed % 3, 9, Random(-seed - 1)
    rows, predict, *args = finish_case(requests, seed=seed, longest=longest, width=width)
    args[1], size = args[1] % vocab, len(args[1])  # stop tokens, of which 8 was padding
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(requests * width, vocab, generator=generator) * 4
    log_sums = torch.stack((logits[:, :5].logsumexp(1), logits[:, 5:].logsumexp(1)), 1)
    logits, log_sums[::3, 0] = logits.bfloat16(), -torch.inf
    paths = [random.sample(range(width), longest) for _ in range(requests)]
    nodes = [[b * width + node for node in path] for b, path in enumerate(paths)]
    return [
        rows, predict % vocab, *args,
        torch.tensor([0, *(random.randint(0, 15) for _ in range(size - 1))], dtype=torch.int32),
        torch.randint(0, 99, (size, vocab), generator=generator).int(),
        torch.tensor(nodes, dtype=torch.int32).view(requests, longest), logits, log_sums,
    ]  # fmt: skip


def scored(args):
    """Return report and states as ``finished`` does, counts, and each row's log-probabilities."""
    *plain, kinds, counts, nodes, logits, log_sums = args
    report, *states = finished(*plain)
    tokens_of = plain[1].view(len(report), -1).tolist() if report else []
    counts, logprobs = counts.tolist(), []
    for line, tokens, path in zip(report, tokens_of, nodes.tolist(), strict=True):
        kind, new = int(kinds[line[Report.ROW]]), line[Report.NEW]
        for token in tokens[: line[Report.ACCEPTED]] if kind & Kind.PENALTIES else ():
            counts[line[Report.ROW]][token] += 2
        pairs = [*zip(path, tokens, strict=False)][: new if kind & Kind.LOGPROBS else 0]
        values = [float(logits[n, token] - log_sums[n].logsumexp(0)) for n, token in pairs]
        logprobs.append(values + [None] * (plain[7] - len(values)))
    return report, states, counts, logprobs


def assert_scored(report, args, want):
    """Compare a report and what ``finish_step`` has written with the results of ``scored``."""
    lines, states, counts, logprobs = want
    longest = args[7]
    words = report[:, Report.TOKENS + longest :].contiguous()
    assert report[:, : Report.TOKENS + longest].tolist() == lines
    assert [each.tolist() for each in args[4:7]] == states
    assert args[9].tolist() == counts
    for got, values, line in zip(words.view(torch.float32), logprobs, words, strict=True):
        known = [value for value in values if value is not None]
        torch.testing.assert_close(got[: len(known)], torch.tensor(known), rtol=1e-4, atol=1e-4)
        assert line[len(known) :].tolist() == [NO_LOGPROB] * (longest - len(known))


ends_of_unused_lanes = pytest.mark.filterwarnings("ignore:invalid value", "ignore:divide by zero")


@by_each("requests", cpu=[0, 1, 3, 6], interpreter=[0, 1, 6], cuda=[*sanitized(0, 1, 7), 300])
@pytest.mark.parametrize("longest", [1, 2, 4, 9])
def test_random_requests(run, requests, longest):
    for seed in range(9):
        args = finish_case(
            requests, seed=seed, longest=longest, width=longest + seed % 4,
            stops=(1, 3, 16)[seed % 3], dtype=(torch.int32, torch.int64)[seed % 2],
        )  # fmt: skip
        want = finished(*args)
        report = run(finish_step, *args)
        assert report.dtype == torch.int32
        assert (report.tolist(), *(each.tolist() for each in args[4:7])) == want


@ends_of_unused_lanes
@by_each("requests", cpu=[0, 1, 6], interpreter=[0, 6], cuda=[*sanitized(0, 1, 7), 300])
def test_counts_and_log_probabilities_of_new_tokens(run, requests):
    for seed in range(9):
        args = scored_case(requests, seed, longest=1 + seed % 4)
        want = scored(args)
        assert_scored(run(finish_step, *args), args, want)


@pytest.mark.gpu
@pytest.mark.parametrize("parts", [3, 16, 126])
def test_a_log_probability_has_the_same_bits_in_paths_of_all_lengths(parts):
    """The order of the sum over the parts of a row must not depend on the length of the path."""
    nodes, vocab = 64, 9
    generator = torch.Generator().manual_seed(parts)
    logits = torch.randn(nodes, vocab, generator=generator) * 4
    log_sums = torch.randn(nodes, parts, generator=generator) * 4 + 20
    tokens = torch.randint(0, vocab, (nodes,), generator=generator)

    def bits(longest):
        requests = nodes // longest
        counts = torch.full((requests,), longest, dtype=torch.int32)
        states = [
            torch.full((requests + 1,), 99, dtype=dtype) for dtype in (torch.int32, torch.int64)
        ]
        args = [
            torch.arange(1, requests + 1), tokens, counts, torch.full((requests + 1, 1), -1),
            *states, states[0].clone(), longest,
            torch.full((requests + 1,), int(Kind.LOGPROBS), dtype=torch.int32),
            torch.zeros(requests + 1, vocab, dtype=torch.int32),
            torch.arange(nodes, dtype=torch.int32).view(requests, longest), logits, log_sums,
        ]  # fmt: skip
        return finish_step(*on_cuda(args))[:, Report.TOKENS + longest :].flatten()

    alone = bits(1)
    assert NO_LOGPROB not in alone
    for longest in (2, 4, 16, 32):
        assert torch.equal(bits(longest), alone), longest


@pytest.mark.gpu
def test_a_graph_finishes_step_after_step():
    args = finish_case(9, seed=5, longest=3)
    ours = on_cuda(args)
    finish_step(*on_cuda(args))
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        report = finish_step(*ours)
    for _ in range(5):
        graph.replay()
        assert torch.equal(report.cpu(), finish_step(*args))
        for got, state in zip(ours[4:7], args[4:7], strict=True):
            assert torch.equal(got.cpu(), state)


def step(tokens, accepted, stops=(), left=100, row=1):
    """Finish a step of one request; return its report's row and the state of all rows."""
    states = (
        torch.tensor([1, 7], dtype=torch.int32), torch.tensor([0, 5]),
        torch.tensor([0, left], dtype=torch.int32),
    )  # fmt: skip
    stop_ids = torch.full((2, 4), -1)
    stop_ids[1, : len(stops)] = torch.tensor(stops, dtype=torch.int64)
    report = finish_step(
        torch.tensor([row]), torch.tensor(tokens), torch.tensor([accepted], dtype=torch.int32),
        stop_ids, *states, len(tokens),
    )  # fmt: skip
    return report[0].tolist(), [each.tolist() for each in states]


@pytest.mark.parametrize(
    ("accepted", "stops", "left", "new", "end"),
    [
        (3, [], 100, 3, RUNNING),
        (1, [], 100, 1, RUNNING),
        (3, [50], 100, 3, RUNNING),
        (3, [10], 100, 1, STOP),  # the first
        (3, [30], 100, 3, STOP),  # the last
        (3, [30, 20], 100, 2, STOP),  # the earlier of two
        (3, [40], 100, 3, RUNNING),  # behind the path
        (3, [30], 2, 2, LENGTH),  # behind the limit
        (3, [20], 2, 2, STOP),  # at the limit
        (3, [], 3, 3, LENGTH),
        (3, [], 2, 2, LENGTH),
        (3, [], 1, 1, LENGTH),
        (3, [], 4, 3, RUNNING),
        (4, [40], 100, 4, STOP),
    ],
)
def test_ends(accepted, stops, left, new, end):
    tokens = [10, 20, 30, 40]
    line, (seq_lens, bonus, remaining) = step(tokens, accepted, stops, left)
    assert line == [1, accepted, new, end, 0, *tokens[:new]] + [-1] * (4 - new)
    assert seq_lens == [1, 7 + accepted]
    assert bonus == [0, tokens[accepted - 1]]
    assert remaining == [0, 0 if end else left - new]


def test_token_0_may_be_a_stop_token_and_padding_stops_nothing():
    assert step([5, 0, 5], 3, [0])[0] == [1, 3, 2, STOP, 0, 5, 0, -1]
    assert step([5, 0, 5], 3)[0] == [1, 3, 3, RUNNING, 0, 5, 0, 5]


@pytest.mark.parametrize("row", [0, 1], ids=["pad", "ended"])
def test_pads_and_ended_requests_report_and_change_nothing(row):
    line, states = step([10, 20], 2, [10], left=0, row=row)
    assert line == [0, 0, 0, RUNNING, 0, -1, -1]
    assert states == [[1, 7], [0, 5], [0, 0]]


def test_several_pads_beside_a_request():
    """Pads share row 0: a write of one must not undo anything of another."""
    args = finish_case(5, seed=0)
    args[0] = torch.tensor([0, 4, 0, 0, 2])
    args[6][:] = 100
    before = [each[0].item() for each in args[4:7]]
    want = finished(*args)
    report = finish_step(*args)
    assert (report.tolist(), *(each.tolist() for each in args[4:7])) == want
    assert report[:, Report.ROW].tolist() == [0, 4, 0, 0, 2]
    assert [each[0].item() for each in args[4:7]] == before


@by_each("most", cpu=[-1, 3], interpreter=[-1], cuda=[-1, 3])
def test_the_drafts_of_each_request_are_reported(run, most):
    args = finish_case(6, seed=5)
    args[3][:], args[6][:] = -1, 100
    is_live = [row > 0 for row in args[0].tolist()]
    nothing = [None] * 5
    alike = run(finish_step, *args, *nothing, None, most)
    assert alike[:, Report.DRAFTS].tolist() == [most * live for live in is_live]
    drafts = torch.tensor([0, 3, 1, 2, 2, 0], dtype=torch.int32)
    own = run(finish_step, *args, *nothing, drafts, most)
    assert own[:, Report.DRAFTS].tolist() == [
        count * live for count, live in zip(drafts.tolist(), is_live, strict=True)
    ]


def test_an_empty_batch():
    args = finish_case(0, seed=0)
    assert finish_step(*args).shape == (0, Report.TOKENS + 4)


@pytest.mark.parametrize(
    ("index", "value", "message"),
    [
        (0, torch.zeros(3).int(), r"req_pool_indices is \[3\] int32"),
        (1, torch.zeros(0).long(), r"predict is \[0\] int64 .* for 3 requests of W >= 1 tokens"),
        (1, torch.zeros(14).long(), r"predict is \[14\] int64 .* for 3 requests"),
        (2, torch.zeros(2).int(), r"num_accepted_tokens is \[2\] .*\[B\] = \[3\] int32"),
        (6, torch.zeros(12).int()[::2], "remaining has strides"),
        (7, 0, "longest_path is 0, expected at least 1"),
    ],
)
def test_refusals(index, value, message):
    args = finish_case(3, seed=0)
    args[index] = value
    with pytest.raises(InputError, match=message):
        finish_step(*args)


@pytest.mark.parametrize("requests", [0, 3])
def test_tracers_see_the_result(requests):
    overload = torch.ops.graphkit.finish_step.default
    args = finish_case(requests, seed=1)
    for each in (args, scored_case(requests, 1)):
        torch.library.opcheck(overload, each, test_utils=("test_schema", "test_faketensor"))
