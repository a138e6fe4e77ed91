"""A long run of an engine: requests join, end, are aborted and preempted, and steps fail.

Nothing may grow with the requests that an engine has served: its objects, the memory of the
process, rows, KV slots, loops and entries of rings. All counters of mailboxes, rings and launches
start a little below 2**31, so that the run passes it. Each text is compared with the table of the
target, see ``table_model``. Every generation serves a third of the requests.

A forward raises an error for some prompts, which ends these requests alone, and a
KeyboardInterrupt at random, after which the next step prefills all running requests again.

    python tools/bench/long_run.py --device cpu --out tools/bench/results/long_run.json
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from report_file import add_out, write_report
from rich.console import Console
from table_model import VOCAB, Table, table_engine

import graphkit as gk
from graphkit.engine import FinishReason, Request
from graphkit.graphs import environment, resolve_device
from graphkit.ops.loop_layout import Control, RingWord
from graphkit.records import BenchReport, Measure
from graphkit.views import bench_view

GENERATIONS = ("v1", "v2", "v3")
RUNNING, SLOTS, IN_SYSTEM = 64, 700, 160
EDGE = 2**31 - 100
"""First number of all counters."""
POISON = VOCAB - 1
"""A prompt that begins with this token fails."""
PARTS = 10
"""The run is measured after each part. The first one fills caches."""


class PoisonError(RuntimeError):
    """The error of a prompt."""


@dataclass
class Faults:
    """Makes the target's forward fail.

    Attributes:
        random: Decides when.
        is_interrupting: Whether forwards are interrupted at random.
        interrupts: Interrupts so far.
    """

    random: random.Random
    is_interrupting: bool = False
    interrupts: int = 0

    def __call__(self, inputs: gk.TargetVerifyInputs) -> None:
        """Raise an error before a forward."""
        if inputs.lengths is not None and bool((inputs.input_ids == POISON).any()):
            raise PoisonError("the prompt is poisoned")
        if self.is_interrupting and self.random.random() < 0.005:
            self.interrupts += 1
            raise KeyboardInterrupt


@dataclass
class Growth:
    """What the process and an engine hold, after each part of a run.

    Attributes:
        objects: Objects of Python.
        bytes: Resident memory.
        device_bytes: Memory of tensors on the device; 0 on the CPU.
        held: Rows, slots and further state of the engine's requests.
    """

    objects: list[int] = field(default_factory=list)
    bytes: list[int] = field(default_factory=list)
    device_bytes: list[int] = field(default_factory=list)
    held: list[int] = field(default_factory=list)

    def note(self, engine: gk.SpeculativeEngine) -> None:
        """Add a measurement. No request is in the engine."""
        gc.collect()
        self.objects.append(len(gc.get_objects()))
        statm = Path("/proc/self/statm")
        self.bytes.append(int(statm.read_text().split()[1]) * 4096 if statm.exists() else 0)
        is_cuda = engine.device.type == "cuda"
        self.device_bytes.append(torch.cuda.memory_allocated(engine.device) if is_cuda else 0)
        memory = engine.memory
        self.held.append(memory.held_slots + memory.pool.size - memory.available_rows)


def start_counters(engine: gk.SpeculativeEngine, first: int) -> None:
    """Let all counters of a captured engine, which runs nothing, continue from a number.

    Reads private members, because no caller needs this.
    """
    runners: list[Any] = list(engine.runners)
    for runner in engine.runners:
        if isinstance(runner, gk.SpecStepRunner):
            loops: Any = runner._loops
            loops.state.ring._words[RingWord.READ] = first
            loops.state.control[Control.WRITTEN] = first
            loops._launched = first
            runners += [loops._captured.prologue, *runner.spec_step.runners]
    for runner in runners:
        mailbox = runner.buffers.mailbox
        mailbox.device_sequence.fill_(first)
        mailbox.rewind()


def serve(engine: gk.SpeculativeEngine, table: Table, count: int, seed: int) -> Counter[str]:
    """Serve random requests; return counts of what happened, with the wrong texts."""
    draw, counts = random.Random(seed), Counter[str]()
    open_requests: dict[Request, list[int]] = {}
    left = count
    while left or engine.has_work:
        while left and len(open_requests) < IN_SYSTEM and draw.random() < 0.95:
            left -= 1
            request, text = _submit(engine, table, draw)
            open_requests[request] = text
        if open_requests and draw.random() < 0.1:
            engine.abort(draw.choice(list(open_requests)))
        try:
            engine.step()
        except PoisonError:
            counts["failed prompts"] += 1
        except KeyboardInterrupt:
            counts["interrupted steps"] += 1
        for request in [each for each in open_requests if each.is_finished]:
            _check(request, open_requests.pop(request), counts)
    counts["wrong texts"] += len(open_requests)  # lost ones
    return counts


def _submit(
    engine: gk.SpeculativeEngine, table: Table, draw: random.Random
) -> tuple[Request, list[int]]:
    prompt = [draw.randrange(VOCAB - 1) for _ in range(draw.randint(1, 14))]
    if draw.random() < 0.01:
        prompt[0] = POISON
    stops = draw.sample(range(VOCAB), 3) if draw.random() < 0.3 else []
    sampling = gk.SamplingParams(
        max_new_tokens=draw.randint(5, 40), stop_token_ids=frozenset(stops),
        temperature=draw.choice([0.0, 0.0, 0.8]),
    )  # fmt: skip
    return engine.submit(prompt, sampling), table.text(prompt, sampling.max_new_tokens, stops)


def _check(request: Request, text: list[int], counts: Counter[str]) -> None:
    reason = request.finish_reason
    assert reason is not None, "it is finished"
    counts[f"ended: {reason.name.lower()}"] += 1
    if reason in (FinishReason.ABORTED, FinishReason.FAILED):
        text = text[: len(request.output_ids)]
    counts["wrong texts"] += request.output_ids != text
    counts["requests preempted"] += request.num_admissions > 1


def run(generation: str, requests: int, seed: int, device: torch.device) -> Iterator[Measure]:
    """Serve requests with one generation, and yield what happened and what has grown."""
    table, faults = Table(device), Faults(random.Random(seed))
    engine = table_engine(
        table, 1, max_batch_size=RUNNING, slots=SLOTS, batch_sizes=[8, RUNNING], before=faults,
        generation=generation, steps_per_launch=1, chunked_prefill_size=256,
    )  # fmt: skip
    counts, growth = Counter[str](), Growth()
    began = time.perf_counter()
    with engine, torch.no_grad():
        engine.capture()
        start_counters(engine, EDGE)
        faults.is_interrupting = True
        for part in range(PARTS):
            counts.update(serve(engine, table, requests // PARTS, seed + part))
            growth.note(engine)
        counts["interrupts"] = faults.interrupts
        counts["preemptions"] = engine.stats.preemptions
        counts["steps past 2**31"] = _past_edge(engine)
    for name, value in sorted(counts.items()):
        bar = 0.0 if name == "wrong texts" else None
        yield Measure(name=name, value=value, unit="", setting=generation, bar=bar)
    more = growth.objects[-1] - growth.objects[0]
    yield Measure(name="more objects", value=more, unit="", setting=generation, bar=2000)
    mib = (growth.bytes[-1] - growth.bytes[0]) / 2**20
    yield Measure(name="more memory", value=mib, unit="MiB", setting=generation, bar=16)
    mib = (growth.device_bytes[-1] - growth.device_bytes[0]) / 2**20
    yield Measure(name="more device memory", value=mib, unit="MiB", setting=generation, bar=1)
    held = max(growth.held)
    yield Measure(name="rows and slots held", value=held, unit="", setting=generation, bar=0)
    seconds = time.perf_counter() - began
    yield Measure(name="time", value=seconds, unit="s", setting=generation)


def _past_edge(engine: gk.SpeculativeEngine) -> int:
    """Return how far the counter of launches of the runner has passed 2**31."""
    return max(int(engine.runners[0].buffers.mailbox.sequence), _written(engine)) - 2**31


def _written(engine: gk.SpeculativeEngine) -> int:
    runner: Any = engine.runners[0]
    return int(runner._loops.state.control[Control.WRITTEN]) if engine.generation == "v3" else 0


def main(argv: list[str] | None = None) -> int:
    """Run the command. The exit code is 1 if a text was wrong or something has grown."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=100_000, help="of all generations")
    parser.add_argument("--seed", type=int, default=0, help="seed of the requests (0)")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda (auto)")
    add_out(parser)
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    each, device = options.requests // len(GENERATIONS), resolve_device(options.device)
    measures = [one for kind in GENERATIONS for one in run(kind, each, options.seed, device)]
    report = BenchReport(
        name="a long run: joins, ends, aborts, preemptions and faults",
        environment=environment(device),
        settings={"requests": options.requests, "seed": options.seed, "first number": EDGE},
        measures=tuple(measures),
    )
    write_report(report, options.out)
    Console(width=120).print(bench_view(report))
    return int(any(one.bar is not None and one.value > one.bar for one in measures))


if __name__ == "__main__":
    sys.exit(main())
