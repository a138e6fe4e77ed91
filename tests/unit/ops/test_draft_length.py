"""choose_body on every device: counts of acceptance, and the best length for the time."""

from __future__ import annotations

from itertools import product
from random import Random

import pytest
import torch

from graphkit.errors import InputError
from graphkit.ops.draft_length import DECAY, IDLE_DECAY, PRIOR, PRIOR_WEIGHT, choose_body
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
    if random.random() < 0.8:
        reported = random.choice(sizes)
        lines = [
            [random.choice([0, row + 1]), random.randint(1, steps[length] + 1), 1, 0, 5]
            for row in range(reported)
        ]
        report = torch.tensor(lines, dtype=torch.int32)
    times = [
        [random.uniform(1, 2) + 0.4 * count * random.random() for count in steps] for _ in sizes
    ]
    has_plain = steps[0] == 0 and random.random() < 0.7
    behind = [0, *(random.choice([0, 0, 1, 2, 4]) for _ in range(11))]
    if random.random() < 0.4:
        behind = [0] * 12
    return {
        "rows": torch.tensor(rows, dtype=torch.int64),
        "batch_sizes": torch.tensor(sizes, dtype=torch.int32),
        "num_steps": torch.tensor(steps, dtype=torch.int32),
        "times": torch.tensor(times, dtype=torch.float32),
        "acceptance": torch.stack([reached, reached * random.random()], 2),
        "body": torch.tensor([-1], dtype=torch.int64),
        "behind": torch.tensor(behind, dtype=torch.int32) if has_plain else None,
        "depth": random.randint(2, 6),
        "report": report,
        "length": length,
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


def chosen_body(case):
    """Return the counts after a call, and the body; ``None`` for the body at a near tie."""
    steps, counts = case["num_steps"].tolist(), case["acceptance"].tolist()
    tables = len(counts)
    if case["report"] is not None:
        drafts = [line[1] - 1 for line in case["report"].tolist() if line[0] > 0]
        for table in range(tables):
            is_own = tables == 1 or table == case["length"]
            for position in range(len(counts[0])):
                seen = [d for d in drafts if is_own and d >= position < steps[case["length"]]]
                decay = DECAY if steps[case["length"]] else IDLE_DECAY
                reached, kept = counts[table][position]
                new = sum(d > position for d in seen)
                counts[table][position] = [decay * reached + len(seen), decay * kept + new]
    rows = [row for row in case["rows"].tolist() if row]
    sizes = case["batch_sizes"].tolist()
    size = next(i for i, each in enumerate(sizes) if each >= len(rows) or each == sizes[-1])
    gains = []
    for index, count in enumerate(steps):
        table = counts[index if tables > 1 else 0]
        rates = [PRIOR]
        for reached, kept in table:
            rates.append((kept + PRIOR_WEIGHT * rates[-1]) / (reached + PRIOR_WEIGHT))
        gains.append(expected_tokens(rates[1:], count) / case["times"][size, index].item())
    best = max(range(len(steps)), key=gains.__getitem__)
    if sum(gain > 0.9999 * gains[best] for gain in gains) > 1:
        return counts, None
    if case["behind"] is None:
        return counts, size * len(steps) + best
    most = max([case["behind"][row].item() for row in rows], default=0)
    if (steps[best] and most) or (not steps[best] and most + 1 >= case["depth"]):
        best = len(steps)
    return counts, size * (len(steps) + 1) + best


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


@by_each("seeds", cpu=[400], interpreter=[40], cuda=[300])
def test_random_choices_equal_the_enumeration(run, seeds):
    bodies = set()
    for seed in range(seeds):
        case = length_case(seed)
        counts, body = chosen_body(case)
        run(choose_body, **case)
        torch.testing.assert_close(case["acceptance"], torch.tensor(counts))
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


@by(INTERPRETER, CUDA)
def test_stored_tokens(run):
    for seed in range(6 if run is INTERPRETER else 30):
        args, want = (stored_case(seed) for _ in range(2))
        store_tokens(*want)
        run(store_tokens, *args)
        for got, expected in zip(args, want, strict=True):
            is_tensor = torch.is_tensor(got)
            assert torch.equal(got, expected) if is_tensor else got == expected


def chooser(*, steps, times, is_deferring=False):
    """Return a function of a report, as counts of accepted tokens, and the index of its length."""
    state = {
        "rows": torch.tensor([1]),
        "batch_sizes": torch.tensor([1], dtype=torch.int32),
        "num_steps": torch.tensor(steps, dtype=torch.int32),
        "times": torch.tensor([times], dtype=torch.float32),
        "acceptance": torch.zeros(1, max(steps), 2),
        "body": torch.zeros(1, dtype=torch.int64),
        "behind": torch.zeros(2, dtype=torch.int32) if is_deferring else None,
        "depth": 4,
    }

    def choose(accepted=None, length=0):
        report = None
        if accepted is not None:
            report = torch.tensor([[1, accepted, accepted, 0, -1]], dtype=torch.int32)
        choose_body(**state, report=report, length=length)
        return state["body"].item()

    choose.state = state
    return choose


def test_equal_times_select_the_longest():
    assert chooser(steps=[0, 1, 3], times=[1, 1, 1])() == 2


def test_rejected_drafts_lead_to_plain_steps_and_are_tried_again():
    choose = chooser(steps=[0, 1, 3], times=[1, 1.2, 1.5])
    body, bodies = choose(), []
    for _ in range(3000):
        body = choose(1, body)  # every draft is wrong
        bodies.append(body)
    tries = sum(body > 0 for body in bodies[100:])
    assert 0 < tries < 0.03 * len(bodies), "a try costs a part of a step"
    assert bodies[40:100].count(0) > 50


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
    choose(2, length=1)
    expected = torch.tensor([[10 * DECAY + 1] * 2, [10 * DECAY] * 2, [10 * DECAY] * 2])
    torch.testing.assert_close(counts[0], expected)
    choose(1, length=0)
    torch.testing.assert_close(counts[0], IDLE_DECAY * expected)
    for _ in range(10_000):
        choose(1, length=0)
    torch.testing.assert_close(counts[0], torch.zeros(3, 2), atol=1e-3, rtol=0)
    assert PRIOR > 0.5, "forgotten positions are tried again"


def test_a_draft_waits_until_no_request_is_behind():
    choose = chooser(steps=[0, 2], times=[1, 1], is_deferring=True)
    behind = choose.state["behind"]
    assert choose() == 1
    behind[1] = 1
    assert choose() == 2, "catches up"
    choose.state["times"][0, 1] = 9
    assert choose() == 0
    behind[1] = 3
    assert choose() == 2, "a fourth token would be behind"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("times", torch.ones(1, 2), r"times is \[1, 2\] float32 on cpu, expected .* = \[1, 3\]"),
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
    assert count.tolist() == [0, 3, 3], "pads store nothing, and a full row stays full"
    assert stored.tolist() == [[0] * 4, [0, 9, 9, 0], [0, 0, 5, 0]]
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
