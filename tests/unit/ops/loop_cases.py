"""Ends of steps and device loops in plain Python, with random cases.

Tests run this file. ``finish_case`` are arguments of ``finish_step``, and ``finished`` is its
model. ``play`` runs random loops on the ops and on ``LoopModel``.
"""

from __future__ import annotations

from random import Random

import torch

from graphkit.ops.device_loop import advance_loop, begin_loop, end_signals
from graphkit.ops.loop_layout import (
    ENTRY_WORDS,
    NO_LOGPROB,
    RING_WORDS,
    Control,
    LoopEnd,
    Report,
    RequestEnd,
    RingWord,
)
from graphkit.ops.processors import Kind

MANY = 2**31 - 3
"""Counters of a process that has run for days: they pass the limit of int32."""


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
            report.append([0, 0, 0, end] + [-1] * longest)
            continue
        for token in tokens[:count]:
            new.append(token)
            if token in stop_ids[row]:
                end = RequestEnd.STOP
            elif len(new) == remaining[row]:
                end = RequestEnd.LENGTH
            if end:
                break
        report.append([row, count, len(new), end, *new] + [-1] * (longest - len(new)))
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
    words = report.cpu()[:, Report.TOKENS + longest :].contiguous()
    assert report[:, : Report.TOKENS + longest].tolist() == lines
    assert [each.tolist() for each in args[4:7]] == states
    assert args[9].tolist() == counts
    for got, values, line in zip(words.view(torch.float32), logprobs, words, strict=True):
        known = [value for value in values if value is not None]
        torch.testing.assert_close(got[: len(known)], torch.tensor(known), rtol=1e-4, atol=1e-4)
        assert line[len(known) :].tolist() == [NO_LOGPROB] * (longest - len(known))


class LoopModel:
    """The control of device loops, over lists."""

    def __init__(self, sizes, columns, entries, written=0):
        self.sizes, self.columns, self.entries = sizes, columns, entries
        self.entry_words = ENTRY_WORDS + sizes[-1] * columns
        self.ring = [0] * (RING_WORDS + entries * self.entry_words)
        self.rows, self.watched = [], []
        self.again = self.body = self.steps_left = self.launch = 0
        self.written = self.ring[RingWord.READ] = written

    def begin(self, rows, watched, max_steps, launch):
        self.rows, self.watched, self.launch = list(rows), list(watched), launch
        self.again, self.steps_left = 1, max_steps
        self._choose_body()

    def advance(self, report):
        ended = [line[Report.END] != RequestEnd.RUNNING for line in report]
        pairs = list(zip(self.rows, self.watched, ended, report, strict=False))
        going = [(row, on) for row, on, is_end, line in pairs if line[Report.ROW] and not is_end]
        self.rows, self.watched = [row for row, _ in going], [on for _, on in going]
        self.steps_left -= 1
        self.written += 1
        end = LoopEnd.RUNNING
        if self.written - self.ring[RingWord.READ] >= self.entries:
            end = LoopEnd.RING_FULL
        if self.steps_left <= 0:
            end = LoopEnd.STEPS
        if self.ring[RingWord.STOP] >= self.launch:
            end = LoopEnd.STOPPED
        if any(on and is_end for _, on, is_end, _ in pairs):
            end = LoopEnd.REQUEST
        if not self.rows:
            end = LoopEnd.IDLE
        self.again = int(end is LoopEnd.RUNNING)
        self._choose_body()
        words = [self.written, len(report), end, self.launch] + [0] * (ENTRY_WORDS - 4)
        words += [word for line in report for word in line]
        at = RING_WORDS + (self.written - 1) % self.entries * self.entry_words
        self.ring[at : at + len(words)] = words
        return end

    @property
    def size(self):
        """Size of the next step."""
        return self.sizes[self.body]

    def state(self):
        most = self.sizes[-1]
        pads = most - len(self.rows)
        return {
            "rows": self.rows + [0] * pads,
            "watched": self.watched + [False] * pads,
            "control": [self.again, self.body, self.steps_left, self.written, self.launch],
            "ring": self.ring,
        }

    def _choose_body(self):
        self.body = next(i for i, size in enumerate(self.sizes) if size >= len(self.rows))


class LoopTensors:
    """The tensors of a device loop, with the ops."""

    def __init__(self, model, device):
        def words(values, dtype=torch.int64):
            return torch.tensor(values, dtype=dtype, device=device)

        self.words, self.most, self.entries = words, model.sizes[-1], model.entries
        self.rows, self.watched = words([0] * self.most), words([0] * self.most, torch.bool)
        self.control, self.sizes = words([0] * len(Control)), words(model.sizes, torch.int32)
        self.control[Control.WRITTEN] = model.written
        self.ring = torch.tensor(model.ring)
        if self.rows.is_cuda:
            self.ring = self.ring.pin_memory()

    def begin(self, rows, watched, max_steps, launch):
        pads = [0] * (self.most - len(rows))
        begin_loop(
            self.words([*rows, *pads]), self.words([*watched, *pads], torch.bool),
            self.words([max_steps]), self.words([launch]),
            self.rows, self.watched, self.control, self.sizes,
        )  # fmt: skip

    def advance(self, report, *, is_signalled=False):
        signals = end_signals(self.control, self.ring, self.entries) if is_signalled else None
        advance_loop(
            self.words(report, torch.int32), self.rows, self.watched, self.control, self.sizes,
            self.ring, self.entries, signals,
        )  # fmt: skip

    def write(self, word, value):
        """Write a word of the host, while the device is idle."""
        self.ring[word] = value

    def state(self):
        state = {name: getattr(self, name).tolist() for name in ("rows", "watched", "control")}
        return state | {"ring": self.ring.tolist()}


def play(seed, device, *, launches=20, largest=12):
    """Run random loops; yield a ``LoopEnd`` and the states of ops and model after each op."""
    random = Random(seed)
    sizes = sorted(random.sample(range(1, largest + 1), min(largest, random.randint(1, 5))))
    longest, entries = random.choice([1, 3, 8]), random.choice([1, 2, 3, 7])
    first = random.choice([0, MANY])
    model = LoopModel(sizes, Report.TOKENS + longest, entries, first)
    ops = LoopTensors(model, device)

    def write(word, value):
        model.ring[word] = value
        ops.write(word, value)

    for turn in range(launches):
        rows = random.sample(range(1, 2 * largest), random.randint(1, sizes[-1]))
        watched = [random.random() < 0.1 for _ in rows]
        max_steps = random.choice([1, 2, 5, 50])
        write(RingWord.READ, model.written)
        for each in (model, ops):
            each.begin(rows, watched, max_steps, first + turn + 1)
        yield LoopEnd.RUNNING, ops.state(), model.state()
        while model.again:
            if random.random() < 0.1:  # of the launch before, this one, the next
                write(RingWord.STOP, model.launch + random.choice([-1, -1, 0, 1]))
            if random.random() < 0.5:
                write(RingWord.READ, random.randint(model.ring[RingWord.READ], model.written))
            report = [line_of(row, longest, random) for row in model.rows]
            report += [line_of(0, longest, random)] * (model.size - len(report))
            end = model.advance(report)
            ops.advance(report, is_signalled=random.random() < 0.5)  # as several ranks do
            yield end, ops.state(), model.state()


def line_of(row, longest, random):
    """Return a row of a report; a tenth of the requests had ended before."""
    new = random.randint(1, longest)
    if row == 0 or random.random() < 0.1:
        return [0, 0, 0, RequestEnd.RUNNING] + [-1] * longest
    end = random.choices(list(RequestEnd), [6, 1, 1])[0]
    tokens = [random.randrange(2**31) for _ in range(new)]
    return [row, random.randint(new, longest), new, end, *tokens] + [-1] * (longest - new)
