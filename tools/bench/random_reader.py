"""A scheduler and reader of device loops whose every choice is random, and what it checks."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
from table_model import VOCAB, Table

import graphkit as gk
from graphkit.ops.loop_layout import Report

MOST_NEW, LONGEST_PROMPT = 40, 9
READERS = ("at once", "slowly", "polling", "later", "after the loop", "stopping", "failing")


class ReaderError(Exception):
    """An exception of the code that reads a stream."""


@dataclass(eq=False)
class Request:
    """A request, its known text, and the tokens that arrived; ``first`` has the first one.

    ``logprobs`` has their log-probabilities, ``None`` for a request without.
    """

    row: int
    text: list[int]
    first: torch.Tensor
    logprobs: list[float] | None
    tokens: list[int] = field(default_factory=list)
    has_ended: bool = False
    is_faulty: bool = False


@dataclass(eq=False)
class Launch:
    """A launch, and its steps that have been read."""

    number: int
    stream: gk.StepStream
    requests: list[Request]
    max_steps: int
    until: list[int]
    steps: list[gk.StepReport] = field(default_factory=list)


class RandomReader:
    """Runs random requests in random loops.

    Args:
        runner: Captured.
        table: The text of the requests.
        rows: Rows of requests.
        ring_entries: Of the runner.
        seed: Determines all choices.

    Attributes:
        counts: What happened, by name.
        faults: What was wrong, as sentences.
    """

    def __init__(
        self, runner: gk.SpecStepRunner, table: Table, rows: int, ring_entries: int, seed: int
    ) -> None:
        self._runner, self._table, self._random = runner, table, Random(seed)
        self._ring_entries = ring_entries
        self._free = list(range(1, rows + 1))
        self._running: list[Request] = []
        self._launches: list[Launch] = []
        self._last_stopped = 0
        self.counts: Counter[str] = Counter()
        self.faults: list[str] = []

    def turn(self) -> None:
        """Admit and abort some requests, launch a loop, and read some of its steps, or none."""
        random = self._random
        max_steps = random.choice([1, 2, 3, 6, 64, 1000])
        waiting = sum(each.max_steps for each in self._launches)
        if waiting and waiting + max_steps > self._ring_entries:  # the runner refuses such a launch
            self.deliver()
        for _ in range(random.choice([0, 0, 1, 2, 5])):
            if self._free:
                self._admit()
        if len(self._running) > 1 and random.random() < 0.2:
            self._abort(random.choice(self._running))
        if not self._running:
            self._admit()
        self._launch(max_steps)
        if random.random() < 0.5:
            self.deliver()

    def finish(self) -> None:
        """Run all requests to their end."""
        self.deliver()
        while self._running:
            self._launch(64)
            self.deliver()

    def deliver(self) -> None:
        """Read all streams, in any order, and check what they brought."""
        for launch in self._random.sample(self._launches, len(self._launches)):
            launch.steps += launch.stream
        for launch in self._launches:
            self.faults += (f"loop {launch.number}: {text}" for text in self._faults_of(launch))
        self._launches.clear()
        for request in list(self._running):
            self._read_first(request)
            if request.has_ended:
                self._running.remove(request)
                self._free.append(request.row)

    def _admit(self) -> None:
        random = self._random
        row = self._free.pop(random.randrange(len(self._free)))
        prompt = [random.randrange(VOCAB) for _ in range(random.randint(1, LONGEST_PROMPT))]
        sampling = gk.SamplingParams(
            max_new_tokens=random.randint(1, MOST_NEW),
            temperature=random.choice([0.0, 0.0, 0.5, 2.0]),
            stop_token_ids=random.sample(range(VOCAB), random.choice([0, 1, 16])),
            seed=random.randrange(2**63),
            logprobs=random.random() < 0.5,
            **_processors(random),
        )
        text = self._table.text(prompt, sampling.max_new_tokens, sampling.stop_token_ids)
        logprobs: list[float] | None = [] if sampling.logprobs else None
        first = self._runner.admit(row, prompt, sampling)
        self._running.append(Request(row, text, first, logprobs))
        self.counts["requests"] += 1

    def _abort(self, request: Request) -> None:
        """Release a row, perhaps while a loop runs it; another request may take it at once."""
        self._runner.release([request.row])
        self._running.remove(request)
        self._free.append(request.row)
        self.counts["requests aborted"] += 1

    def _launch(self, max_steps: int) -> None:
        random, runner = self._random, self._runner
        most = min(len(self._running), runner.table.max_batch_size)
        requests = random.sample(self._running, random.randint(1, most))
        rows = [request.row for request in requests]
        until = random.sample(rows, random.choice([0, 0, 1, len(rows)]))
        stream = runner.launch(rows, max_steps=max_steps, until=until)
        self.counts["loops"] += 1
        launch = Launch(self.counts["loops"], stream, requests, max_steps, until)
        self._launches.append(launch)
        how = random.choice(READERS)
        self.counts[f"read: {how}"] += 1
        with suppress(ReaderError):
            self._read(launch, how)

    def _read(self, launch: Launch, how: str) -> None:
        """Read steps of a launch; ``deliver`` reads what is left."""
        random, stream, steps = self._random, launch.stream, launch.steps
        if how == "at once":
            steps += stream
        elif how == "slowly":
            for step in stream:
                steps.append(step)
                time.sleep(random.random() * 1e-3)
        elif how == "polling":
            while stream.end is None:
                if (each := stream.poll()) is not None:
                    steps.append(each)
        elif how == "after the loop":  # which fills the ring, unless it ends before
            self._runner.release([])  # behind the loop
            if self._runner.device.type == "cuda":
                torch.cuda.synchronize()
        elif how == "stopping":
            steps += (each for _, each in zip(range(random.randint(0, 3)), stream, strict=False))
            stream.stop()
            self._last_stopped = launch.number
        elif how == "failing":
            self._last_stopped = launch.number
            with stream:
                steps.append(next(stream))
                raise ReaderError

    def _read_first(self, request: Request) -> None:
        if not request.tokens:
            line = request.first[0].tolist()
            request.tokens = line[Report.TOKENS :][: line[Report.NEW]]
            request.has_ended = line[Report.END] != gk.RequestEnd.RUNNING
            if request.logprobs is not None:
                request.logprobs += (
                    request.first[0, Report.TOKENS + 1 :].view(torch.float32).tolist()
                )

    def _faults_of(self, launch: Launch) -> Iterator[str]:
        """Take in the tokens of a launch; yield what is wrong with them, and with its steps."""
        requests, end, ended = launch.requests, launch.stream.end, set()
        for request in requests:
            self._read_first(request)
        for number, step in enumerate(launch.steps, 1):
            live = [request for request in requests if not request.has_ended]
            rows, lines = [request.row for request in live], step.requests
            if [line.req_pool_index for line in lines] != rows:
                yield f"step {number} ran other requests than {rows}: {lines}"
            if not ended.isdisjoint(launch.until):
                yield f"it runs on after the end of rows {ended}, of which {launch.until} end it"
            for request, line in zip(live, lines, strict=False):
                request.tokens += line.tokens
                if request.logprobs is not None:
                    request.logprobs += line.logprobs
                elif line.logprobs:
                    yield f"row {request.row} has log-probabilities, and did not ask for them"
                request.has_ended = line.end != gk.RequestEnd.RUNNING
            ended = {request.row for request in live if request.has_ended}
        yield from filter(None, map(self._fault_of, requests))
        is_idle = all(request.has_ended for request in requests)
        expected = {
            gk.LoopEnd.STEPS: len(launch.steps) == launch.max_steps,
            gk.LoopEnd.REQUEST: not ended.isdisjoint(launch.until),
            gk.LoopEnd.STOPPED: self._last_stopped >= launch.number,
            gk.LoopEnd.RING_FULL: launch.max_steps > self._ring_entries,
        }
        if len(launch.steps) > launch.max_steps or is_idle != (end is gk.LoopEnd.IDLE):
            yield f"it ended by {end} after {len(launch.steps)} of {launch.max_steps} steps"
        elif not (is_idle or expected.get(end)):
            yield f"it ended by {end} without that reason"
        self.counts["steps"] += len(launch.steps)
        self.counts[f"ended by {end.name.lower()}"] += 1

    def _fault_of(self, request: Request) -> str:
        """Return what is wrong with the tokens of a request, once."""
        wanted = request.text if request.has_ended else request.text[: len(request.tokens)]
        is_short = len(request.tokens) < len(request.text)
        # The target is certain of each token.
        if request.logprobs is not None and request.logprobs != [0.0] * len(request.tokens):
            request.is_faulty = True
            return f"row {request.row} has log-probabilities {request.logprobs}, expected zeros"
        if request.is_faulty or (request.tokens == wanted and is_short != request.has_ended):
            return ""
        request.is_faulty = True
        return f"row {request.row} has {request.tokens}, expected {wanted}"


def _processors(random: Random) -> dict[str, Any]:
    """Return random processors, none of which changes the text: its logits are much larger."""
    return {
        "repetition_penalty": random.choice([1.0, 1.0, 0.8, 1.3]),
        "presence_penalty": random.choice([0.0, 0.0, -2.0, 2.0]),
        "frequency_penalty": random.choice([0.0, 0.0, -2.0, 2.0]),
        "logit_bias": {random.randrange(VOCAB): 5.0} if random.random() < 0.3 else None,
    }
