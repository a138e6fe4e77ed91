"""choose_body on every device: counts of acceptance, and the best length for the time."""

from __future__ import annotations

import math
from itertools import pairwise, product
from random import Random

import pytest
import torch

from graphkit.errors import InputError
from graphkit.ops import draft_length
from graphkit.ops.draft_length import (
    CATCH_UP_RESERVE,
    DECAY,
    DRIFT,
    FIRST_CREDIT,
    FIRST_WEIGHT,
    IDLE_DECAY,
    LEVELS,
    MOST_CREDIT,
    NEXT_WEIGHT,
    PRIOR,
    PROBE_SHARE,
    REQUEST_DECAY,
    REQUEST_WEIGHT,
    choose_body,
    new_ledger,
)
from graphkit.ops.loop_layout import Ledger
from graphkit.ops.stored_tokens import store_tokens
from op_devices import CUDA, INTERPRETER, by, by_each, on_cuda


def length_case(seed):
    """Return random arguments of ``choose_body``; those it writes are new."""
    random = Random(seed)
    sizes = sorted(random.sample(range(1, 9), random.randint(1, 3)))
    steps = sorted(random.sample(range(6), random.randint(1, 4)))
    tables, positions = random.choice([1, len(steps)]), max(steps[-1], 1)
    requests = random.randint(0, sizes[-1])
    rows = random.sample(range(1, 12), requests) + [0] * (sizes[-1] - requests)
    reached = torch.rand(tables, positions, generator=torch.Generator().manual_seed(seed)) * 40
    report, length = None, random.randrange(len(steps))
    is_divided = tables == 1 and random.random() < 0.7
    if random.random() < 0.8:
        reported, lines = random.choice(sizes), []
        for row in range(reported):
            drafts = random.randint(0, steps[length]) if is_divided else steps[length]
            lines.append(
                [random.choice([0, row + 1]), random.randint(1, drafts + 1), 1, 0, drafts, 5]
            )
        report = torch.tensor(lines, dtype=torch.int32)
    of_requests = torch.rand(12, positions, generator=torch.Generator().manual_seed(seed + 1)) * 20
    shares = torch.rand(12, positions, generator=torch.Generator().manual_seed(seed + 2))
    row_counts = [[size + random.randint(0, size * count) for count in steps] for size in sizes]
    has_plain = steps[0] == 0 and random.random() < 0.7
    times = [
        [random.uniform(1, 2) + 0.4 * count * random.random() for count in steps]
        + [random.uniform(1.5, 3)] * has_plain
        for _ in sizes
    ]
    behind = [0, *(random.choice([0, 0, 1, 2, 4]) for _ in range(11))]
    if random.random() < 0.4:
        behind = [0] * 12
    return {
        "rows": torch.tensor(rows, dtype=torch.int64),
        "batch_sizes": torch.tensor(sizes, dtype=torch.int32),
        "num_steps": torch.tensor(steps, dtype=torch.int32),
        "row_counts": torch.tensor(row_counts, dtype=torch.int32),
        "times": torch.tensor(times, dtype=torch.float32),
        "acceptance": torch.stack([reached, reached * random.random()], 2),
        "body": torch.tensor([-1], dtype=torch.int64),
        "ledger": torch.tensor([random.choice([0, 0.3, 1, 5, 50]), 7, 8, 0], dtype=torch.float64),
        "num_drafts": torch.full((sizes[-1],), -7, dtype=torch.int32) if is_divided else None,
        "by_request": torch.stack([of_requests, of_requests * shares], 2) if is_divided else None,
        "behind": torch.tensor(behind, dtype=torch.int32) if has_plain else None,
        "depth": random.randint(2, 6),
        "report": report,
        "variant": len(steps) if has_plain and not steps[length] else length,
    }


def expected_tokens(rates, steps):
    """Return the mean of accepted tokens over all outcomes of a draft of ``steps`` positions."""
    total = 0.0
    for outcome in product((True, False), repeat=steps):
        chance, tokens, goes_on = 1.0, 1, True
        for rate, is_right in zip(rates, outcome, strict=False):
            chance *= rate if is_right else 1 - rate
            goes_on = goes_on and is_right
            tokens += goes_on
        total += chance * tokens
    return total


def counted(case, length):
    """Return the counts after a call."""
    steps, counts = case["num_steps"].tolist(), case["acceptance"].tolist()
    tables = len(counts)
    pairs = [(line[1] - 1, line[4]) for line in case["report"].tolist() if line[0] > 0]
    for table in range(tables):
        is_own = tables == 1 or table == length
        decay = DECAY if is_own and steps[length] else IDLE_DECAY
        for position in range(len(counts[0])):
            seen = [d for d, verified in pairs if is_own and d >= position < verified]
            reached, kept = counts[table][position]
            new = sum(d > position for d in seen)
            counts[table][position] = [decay * reached + len(seen), decay * kept + new]
    return counts


def counted_by_request(case):
    """Return the counts of each request after a call."""
    if case["by_request"] is None:
        return None
    counts = case["by_request"].tolist()
    for row, accepted, _, _, verified, _ in [] if case["report"] is None else case["report"]:
        for position, (reached, kept) in enumerate(counts[row] if row else []):
            decay = REQUEST_DECAY if verified else IDLE_DECAY
            is_reached = accepted - 1 >= position < verified
            is_kept = accepted - 1 > position < verified
            counts[row][position] = [
                decay * reached + int(is_reached), decay * kept + int(is_kept)
            ]  # fmt: skip
    return counts


def chances(counts, of_request):
    """Return the chance that each draft of a request is accepted."""
    path, own, rate, result = 1.0, 0.0, PRIOR, []
    for position, (reached, kept) in enumerate(counts):
        weight = NEXT_WEIGHT if position else FIRST_WEIGHT
        before, rate = rate, (kept + weight * rate) / (reached + weight)
        prior = min(1, own * rate / before) if position else rate
        tried, right = of_request[position]
        own = (right + REQUEST_WEIGHT * prior) / (tried + REQUEST_WEIGHT)
        path *= own
        result.append(path)
    return result


def budget_of(case, size, live, length):
    """Return how many drafts a step of a length verifies."""
    spare = case["row_counts"][size, length].item() - live
    return min(spare, live * case["num_steps"][length].item())


def size_of(case, requests):
    """Return the index of the size that requests run at."""
    sizes = case["batch_sizes"].tolist()
    return next(i for i, size in enumerate(sizes) if size >= requests or size == sizes[-1])


def ledger_after(case):
    """Return the ledger after a call."""
    credit, plain, taken, clock = case["ledger"].tolist()
    report, steps = case["report"], case["num_steps"].tolist()
    lines = [] if report is None else [line for line in report.tolist() if line[0] > 0]
    if lines and not steps[0]:
        times = case["times"][size_of(case, len(report))].tolist()
        tokens = sum(line[2] for line in lines) / len(lines)
        lost = times[case["variant"]] / times[0] - tokens if case["variant"] else 0
        credit = min(credit + PROBE_SHARE - lost, MOST_CREDIT + steps[-1])
        plain, taken = plain + tokens * times[0], taken + times[case["variant"]]
    return [credit, plain, taken, clock]


def chosen_body(case):
    """Return counts and ledger after a call, and the body; ``None`` for the body at a near tie."""
    steps, counts = case["num_steps"].tolist(), case["acceptance"].tolist()
    if case["report"] is not None:
        counts = counted(case, 0 if case["variant"] == len(steps) else case["variant"])
    ledger = ledger_after(case)
    rows = [row for row in case["rows"].tolist() if row]
    size, variants = size_of(case, len(rows)), case["times"].shape[1]
    times, behind = case["times"][size].tolist(), case["behind"]
    most = 0 if behind is None else max([behind[row].item() for row in rows], default=0)
    catch_up = 0.0 if behind is None else times[-1] / times[0] - 1
    speeds, costs = [], [-math.inf]
    by_request = counted_by_request(case)
    for index, count in enumerate(steps):
        rates = [PRIOR]
        for position, (reached, kept) in enumerate(counts[index if len(counts) > 1 else 0]):
            weight = NEXT_WEIGHT if position else FIRST_WEIGHT
            rates.append((kept + weight * rates[-1]) / (reached + weight))
        tokens = expected_tokens(rates[1:], count)
        if by_request is not None:
            alone = [chances(counts[0], by_request[row])[:count] for row in rows]
            best = sorted((chance for each in alone for chance in each), reverse=True)
            tokens = 1 + sum(best[: budget_of(case, size, len(rows), index)]) / max(len(rows), 1)
        speeds.append(tokens / times[index])
        costs += [times[index] / times[0] - 1 + catch_up * (most > 0)] * (index > 0)
    costs = [-math.inf] * len(costs) if steps[0] else costs
    bounds = [*costs, catch_up + CATCH_UP_RESERVE]
    if any(abs(bound - ledger[0]) < 1e-4 for bound in bounds):
        return counts, ledger, None
    best = max(range(len(steps)), key=speeds.__getitem__)
    covered = [index for index, cost in enumerate(costs) if cost < ledger[0]]
    chosen = max(covered, key=speeds.__getitem__)
    for compared in (speeds, [speeds[index] for index in covered]):
        if sum(speed > 0.9999 * max(compared) for speed in compared) > 1:
            return counts, ledger, None
    if behind is not None and chosen and most:
        chosen = variants - 1
    elif behind is not None and not chosen:
        is_due = not best and most + 1 >= case["depth"] and ledger[0] > bounds[-1]
        chosen = variants - 1 if is_due else 0
    return counts, ledger, size * variants + chosen


def stored_case(seed):
    """Return random arguments of ``store_tokens``; those it writes are new."""
    random, generator = Random(seed), torch.Generator().manual_seed(seed)
    requests, width, hidden = random.randint(0, 5), random.randint(1, 3), random.choice([3, 1500])
    rows = [row if random.random() < 0.8 else 0 for row in random.sample(range(1, 9), requests)]
    has_states = random.random() < 0.7
    return [
        torch.tensor(rows, dtype=torch.int64),
        torch.randint(100, (requests * width,), generator=generator),
        torch.zeros(9, 4, dtype=torch.int64),
        torch.tensor([0, *(random.randint(0, 3) for _ in range(8))], dtype=torch.int32),
        3,
        torch.randn(requests * width, hidden, generator=generator) if has_states else None,
        torch.zeros(9, 4, hidden) if has_states else None,
    ]


def check_division(case, by_request):
    """Compare the drafts of each request with the chances of all."""
    if by_request is None:
        return
    torch.testing.assert_close(case["by_request"], torch.tensor(by_request))
    rows, drafts = case["rows"].tolist(), case["num_drafts"].tolist()
    live, lengths = sum(row > 0 for row in rows), len(case["num_steps"])
    size, length = divmod(case["body"].item(), case["times"].shape[1])
    assert all((count == -1) == (row == 0) for row, count in zip(rows, drafts, strict=True))
    taken, left = [1.0], [0.0]
    count = 0 if length == lengths else case["num_steps"][length].item()
    budget = budget_of(case, size, live, length) if count else 0
    assert sum(max(each, 0) for each in drafts) == budget
    for row, number in zip(rows, drafts, strict=True):
        if row:
            alone = chances(case["acceptance"][0].tolist(), by_request[row])[:count]
            assert number <= count
            taken += alone[:number]
            left += alone[number:]
    assert min(taken) > max(left) - 2 / LEVELS


@by_each("seeds", cpu=[400], interpreter=[50], cuda=[300])
def test_random_choices_equal_the_enumeration(run, seeds):
    bodies = set()
    for seed in range(seeds):
        case = length_case(seed)
        counts, ledger, body = chosen_body(case)
        by_request = counted_by_request(case)
        run(choose_body, **case)
        torch.testing.assert_close(case["acceptance"], torch.tensor(counts))
        torch.testing.assert_close(case["ledger"], torch.tensor(ledger, dtype=torch.float64))
        check_division(case, by_request)
        if body is not None:
            assert case["body"].item() == body, seed
            bodies.add(body)
    assert len(bodies) > 10 or seeds < 100


@pytest.mark.gpu
def test_a_graph_chooses_again_and_again():
    """Counts that a replay writes are those that the next one reads."""
    case = next(case for seed in range(99) if (case := length_case(seed))["report"] is not None)
    ours, others = ({name: on_cuda(value) for name, value in case.items()} for _ in range(2))
    choose_body(**others)  # compiles
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        choose_body(**ours)
    for _ in range(5):
        graph.replay()
        choose_body(**case)
        torch.testing.assert_close(ours["acceptance"].cpu(), case["acceptance"])


@pytest.mark.gpu
def test_the_clock_of_the_device_times_the_steps_of_a_graph():
    choose = chooser(steps=[0, 2], times=[1e6, 2e6], is_timed=True)
    state = {name: on_cuda(value) for name, value in choose.state.items()}
    report = on_cuda(torch.tensor([[1, 1, 1, 0, 0, -1]], dtype=torch.int32))
    choose_body(**state, report=report)  # compiles
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        choose_body(**state, report=report)
    clocks, taken = [], []
    for _ in range(3):
        graph.replay()
        clocks.append(state["ledger"][Ledger.CLOCK].item())
        taken.append(state["ledger"][Ledger.STEP_TIME].item())
    assert 0 < clocks[0] < clocks[1] < clocks[2]
    spans = [1e-3 * (after - before) for before, after in pairwise(clocks)]
    assert [after - before for before, after in pairwise(taken)] == pytest.approx(spans)
    assert state["times"][0, 0] < 1e6, "the steps are shorter than the time before"


@by(INTERPRETER, CUDA)
def test_stored_tokens(run):
    for seed in range(6 if run is INTERPRETER else 30):
        args, want = (stored_case(seed) for _ in range(2))
        store_tokens(*want)
        run(store_tokens, *args)
        for got, expected in zip(args, want, strict=True):
            is_tensor = torch.is_tensor(got)
            assert torch.equal(got, expected) if is_tensor else got == expected


def chooser(*, steps, times, is_deferring=False, **changes):
    """Return a function of a report, as counts of accepted tokens, and the index of its length."""
    state = {
        "rows": torch.tensor([1]),
        "batch_sizes": torch.tensor([1], dtype=torch.int32),
        "num_steps": torch.tensor(steps, dtype=torch.int32),
        "row_counts": torch.tensor([[1 + count for count in steps]], dtype=torch.int32),
        "times": torch.tensor([times], dtype=torch.float32),
        "acceptance": torch.zeros(1, max(steps), 2),
        "body": torch.zeros(1, dtype=torch.int64),
        "ledger": new_ledger(torch.device("cpu")),
        "behind": torch.zeros(2, dtype=torch.int32) if is_deferring else None,
        "depth": 4,
        **changes,
    }

    def choose(accepted=None, variant=0):
        report = None
        if accepted is not None:
            report = torch.tensor([[1, accepted, accepted, 0, 0, -1]], dtype=torch.int32)
        choose_body(**state, report=report, variant=variant)
        return state["body"].item()

    choose.state = state
    return choose


def test_equal_times_select_the_longest():
    assert chooser(steps=[0, 1, 3], times=[1, 1, 1])() == 2


def test_rejected_drafts_lead_to_plain_steps_and_are_tried_again():
    choose = chooser(steps=[0, 1, 3], times=[1, 1.2, 1.5])
    body, bodies = choose(), []
    for _ in range(3000):
        bodies.append(body)
        body = choose(1, body)  # every draft is wrong
    lost = 0.2 * bodies.count(1) + 0.5 * bodies.count(2)
    assert lost <= FIRST_CREDIT + PROBE_SHARE * len(bodies)
    assert any(bodies[1000:]), "drafts are tried again"


def test_accepted_drafts_lead_to_long_drafts():
    choose = chooser(steps=[0, 1, 3], times=[1, 1.3, 1.9])
    body = choose()
    for _ in range(50):
        body = choose([1, 2, 4][body], body)
    assert body == 2


@pytest.mark.slow
def test_counts_decay_and_slowly_in_plain_steps():
    choose = chooser(steps=[0, 1, 3], times=[1, 1, 1])
    counts = choose.state["acceptance"]
    counts[:] = 10.0
    choose(2, variant=1)
    expected = torch.tensor([[10 * DECAY + 1] * 2, [10 * DECAY] * 2, [10 * DECAY] * 2])
    torch.testing.assert_close(counts[0], expected)
    choose(1, variant=0)
    torch.testing.assert_close(counts[0], IDLE_DECAY * expected)
    for _ in range(6000):
        choose(1, variant=0)
    torch.testing.assert_close(counts[0], torch.zeros(3, 2), atol=1e-3, rtol=0)
    assert PRIOR > 0.5, "forgotten positions are tried again"


def test_a_draft_waits_until_no_request_is_behind():
    choose = chooser(steps=[0, 2], times=[1, 1, 1], is_deferring=True)
    behind = choose.state["behind"]
    assert choose() == 1
    behind[1] = 1
    assert choose() == 2, "catches up"
    choose.state["times"][0, 1] = 9
    assert choose() == 0
    behind[1] = 3
    assert choose() == 2, "a fourth token would be behind"
    choose.state["times"][0, 2] = 1 + FIRST_CREDIT - 0.9 * CATCH_UP_RESERVE
    assert choose() == 0, "the credit does not cover it"


def test_a_draft_runs_if_the_credit_covers_its_loss():
    choose = chooser(steps=[0, 2], times=[1, 1.5, 1.25], is_deferring=True)
    ledger, behind = choose.state["ledger"], choose.state["behind"]
    ledger[Ledger.CREDIT] = 0.49
    assert choose() == 0
    ledger[Ledger.CREDIT] = 0.5
    assert choose() == 1
    behind[1] = 1
    assert choose() == 0, "it would have to catch up before"
    ledger[Ledger.CREDIT] = 0.75
    assert choose() == 2


def test_gains_are_kept_up_to_the_most_credit():
    choose = chooser(steps=[0, 2], times=[1, 1.5])
    for _ in range(9):
        choose(3, variant=1)
    assert choose.state["ledger"][Ledger.CREDIT] == MOST_CREDIT + 2
    assert choose.state["ledger"].tolist()[1:3] == [9 * 3 * 1.0, 9 * 1.5]


def test_times_follow_those_of_the_steps(monkeypatch):
    now = [1_000_000]
    monkeypatch.setattr(draft_length, "clock_ns", lambda: now[0])
    choose = chooser(steps=[0, 2], times=[100.0, 150.0], is_timed=True)
    times, ledger = choose.state["times"][0], choose.state["ledger"]
    choose()
    for _ in range(80):
        now[0] += 120_000
        choose(1, variant=0)
        now[0] += 165_000
        choose(2, variant=1)
    assert times.tolist() == pytest.approx([120, 165], rel=0.01)
    assert ledger[Ledger.STEP_TIME].item() == pytest.approx(80 * 285)
    now[0] += 10**9  # such as a pause of the process
    choose(1, variant=0)
    assert times[0].item() == pytest.approx(120 * (1 + DRIFT), rel=0.02)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("times", torch.ones(1, 2), r"times is \[1, 2\] float32 on cpu, expected 3 columns"),
        ("acceptance", torch.ones(1, 3, 2).double(), "acceptance is .* float64"),
        ("body", torch.zeros(1).int(), r"body is \[1\] int32"),
        ("depth", 0, "depth is 0, expected at least 1"),
    ],
)
def test_refusals(name, value, message):
    state = chooser(steps=[0, 1, 3], times=[1, 1, 1]).state
    with pytest.raises(InputError, match=message) as caught:
        choose_body(**state | {name: value})
    assert caught.value.field == name


def test_tokens_are_stored_behind_those_of_their_row():
    rows, tokens = torch.tensor([2, 0, 1]), torch.tensor([5, 6, 7, 8, 9, 10])
    stored, count = torch.zeros(3, 4).long(), torch.tensor([0, 1, 2]).int()
    states = torch.arange(6.0)[:, None]
    stored_states = torch.zeros(3, 4, 1)
    for _ in range(2):
        store_tokens(rows, tokens, stored, count, 3, states, stored_states)
    assert count.tolist() == [0, 3, 4], "pads store nothing, and a row keeps its last tokens"
    assert stored.tolist() == [[0] * 4, [0, 9, 9, 0], [5, 0, 5, 0]]
    assert stored_states[1].flatten().tolist() == [0, 4, 4, 0]
    with pytest.raises(InputError, match="both of hidden_states and stored_states"):
        store_tokens(rows, tokens, stored, count, 3, states)
    with pytest.raises(InputError, match="the same number of tokens for each of 3"):
        store_tokens(rows, tokens[:4], stored, count, 3)


@pytest.mark.parametrize(
    ("op", "arguments"),
    [("choose_body", list(length_case(3).values())), ("store_tokens", stored_case(1))],
)
def test_tracers_see_the_ops(op, arguments):
    overload = getattr(torch.ops.graphkit, op).default
    torch.library.opcheck(overload, arguments, test_utils=("test_schema", "test_faketensor"))
