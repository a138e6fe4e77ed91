"""Host time of engine steps on the CPU, with small and large KV pools, by generation.

A step must cost the host as much with a pool of 1,000,000 slots as with one of 16,384. The target
is a table of next tokens, so that the model takes next to no time. Each round serves twice as many
requests as run at once, so that rows and slots are freed and allocated all the time. The engines of
one setting take turns. The time is CPU time of the engine's thread, recorded kernels included.

    python tools/bench/scale.py --out tools/bench/results/scale.json
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import product
from statistics import median

import torch
from table_model import STEPS, VOCAB, ErringDrafter, Table, TableForward
from timing import publish

import graphkit as gk
from graphkit.graphs import environment
from graphkit.records import BenchReport, Measure

GENERATIONS, REQUESTS, SLOTS = ("v1", "v2", "v3"), (1, 16, 64), (16_384, 1_000_000)
PROMPT, NEW, CONTEXT, BAR = 8, 32, 96, 1.3
PER_ROUND = 2
"""Requests of a round for each that runs at once."""


def table_engine(table: Table, generation: str, requests: int, slots: int) -> gk.SpeculativeEngine:
    """Create a captured engine over a table, which runs so many requests at once."""
    device = torch.device("cpu")
    rows = gk.ReqToTokenPool(requests, CONTEXT, device)
    pool = gk.MHATokenToKVPool(slots, 1, torch.float32, 1, 1, 0, device)
    engine = gk.SpeculativeEngine(
        gk.EngineModel(TableForward(table), gk.SdpaAttention(rows, pool)),
        ErringDrafter(table, topk=1),
        spec=gk.SpecConfig("NGRAM", STEPS, 1, STEPS + 1),
        sizes=gk.BufferSizes(requests, CONTEXT, 1, VOCAB, torch.float32),
        batch_sizes=[requests],
        device=device,
        generation=generation,  # type: ignore[arg-type]  # one of GENERATIONS
    )
    engine.capture()
    return engine


def serve(engine: gk.SpeculativeEngine) -> float:
    """Serve a round of requests; return microseconds of the thread per step and request."""
    count = PER_ROUND * engine.sizes.max_batch_size
    prompts = [[(i + j) % VOCAB for j in range(PROMPT)] for i in range(count)]
    before, began = engine.stats.num_verifies, time.thread_time()
    engine.generate(prompts, gk.SamplingParams(max_new_tokens=NEW))
    return (time.thread_time() - began) * 1e6 / (engine.stats.num_verifies - before)


def measures(rounds: int) -> Iterator[Measure]:
    """Yield the times of all settings, and large over small pools with the bar."""
    table, what = Table(torch.device("cpu")), "host time per step and request"
    for generation, requests in product(GENERATIONS, REQUESTS):
        with ExitStack() as stack:
            engines = {
                slots: stack.enter_context(table_engine(table, generation, requests, slots))
                for slots in SLOTS
            }
            times: dict[int, list[float]] = {slots: [serve(engines[slots])] for slots in SLOTS}
            for each in times.values():
                each.clear()  # the first round warms up
            for turn in range(rounds):
                for slots in SLOTS if turn % 2 else reversed(SLOTS):
                    times[slots].append(serve(engines[slots]))
        setting = f"{generation}, {requests} at once"
        for slots in SLOTS:
            yield Measure(
                name=what, value=median(times[slots]), unit="us",
                setting=setting, variant=f"{slots:,} slots",
            )  # fmt: skip
        small, large = (median(times[slots]) for slots in SLOTS)
        yield Measure(
            name=f"{setting}: {SLOTS[1]:,} over {SLOTS[0]:,} slots",
            value=large / small, unit="x", bar=BAR,
        )  # fmt: skip


def report(rounds: int) -> BenchReport:
    """Measure with one thread, as an engine's thread runs it."""
    torch.set_num_threads(1)
    return BenchReport(
        name="host time of steps by the size of the KV pool",
        environment=environment(torch.device("cpu")),
        settings={
            "model": "a table of next tokens", "prompt tokens": PROMPT, "new tokens": NEW,
            "requests of a round": f"{PER_ROUND} per request that runs", "rounds": rounds,
        },
        measures=tuple(measures(rounds)),
    )  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Run the command."""
    return publish(__doc__ or "", 5, report, argv)


if __name__ == "__main__":
    sys.exit(main())
