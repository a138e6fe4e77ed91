"""Random arguments of ``choose_body``, and its result by enumeration."""

from __future__ import annotations

from itertools import product
from random import Random

import torch

from graphkit.ops.draft_length import DECAY, IDLE_DECAY, PRIOR, PRIOR_WEIGHT


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
