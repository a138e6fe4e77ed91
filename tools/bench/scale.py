"""Host time of engine steps on the CPU as the work grows: slots, pages, context, requests, queue.

The cost of a step for one request must not grow with the slots of the pool, the slots of a page,
the context limit, the requests that wait, or those that run beside it. A submitted request must not
cost more in a long queue, nor a prompt token in a long prompt. The target is a table of next
tokens, and attention computes nothing, so that the model takes next to no time. Engines run twice
as many requests as fit at once, so that rows and slots are freed and allocated all the time. The
engines of one comparison take turns. The time is CPU time of the engine's thread, recorded kernels
included.

    python tools/bench/scale.py --out tools/bench/results/scale.json
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import product
from statistics import median
from typing import Any

import torch
from table_model import STEPS, VOCAB, ErringDrafter, Table, TableForward
from timing import publish

import graphkit as gk
from graphkit.graphs import environment
from graphkit.records import BenchReport, Measure

GENERATIONS = ("v1", "v2", "v3")
PROMPT, NEW, BAR = 8, 32, 1.3
PER_ROUND = 2
"""Requests of a round for each that runs at once."""
PROMPTS = (512, 100_000)


@dataclass(frozen=True)
class Work:
    """Size of the work of an engine.

    Attributes:
        running: Requests that run at once.
        waiting: Requests that wait all the time.
        context: Most tokens of a request.
        slots: KV slots.
        page: Slots per page.
    """

    running: int = 64
    waiting: int = 0
    context: int = 1024
    slots: int = 16_384
    page: int = 1

    def __str__(self) -> str:
        page = f" in pages of {self.page}" if self.page > 1 else ""
        waiting = f", {self.waiting:,} waiting" if self.waiting else ""
        return (
            f"{self.running} running{waiting}, context {self.context:,}, {self.slots:,} slots{page}"
        )


COMPARISONS: dict[str, tuple[Work, ...]] = {
    "slots, 1 running": (Work(running=1), Work(running=1, slots=1_000_000)),
    "slots, 64 running": (Work(), Work(slots=1_000_000)),
    "pages": (Work(slots=1_000_000), *(Work(slots=1_000_000, page=page) for page in (16, 64))),
    "context": (Work(slots=1_000_000), Work(slots=1_000_000, context=131_072)),
    "waiting": (Work(), Work(waiting=10_000)),
    "running": (Work(slots=1_000_000), Work(slots=1_000_000, running=256)),
    "all": (Work(), Work(256, 10_000, 131_072, 1_000_000, 16)),
}
"""Engines that take turns. Each is judged against the first of its comparison."""


class NoAttention(gk.PooledAttention):
    """Attention of a model without attention layers.

    Args:
        requests: Slots of each request.
        pool: A pool without layers.
    """

    def __init__(self, requests: gk.ReqToTokenPool, pool: gk.MHATokenToKVPool) -> None:
        self.req_to_token_pool, self.kv_pool = requests, pool

    def supports(self, mode: gk.ForwardMode) -> bool:  # noqa: ARG002
        """Return true."""
        return True

    def init_state(self, sizes: gk.BufferSizes, max_tokens: int) -> None:
        """Do nothing."""

    def metadata(self, mode: gk.ForwardMode, inputs: Any) -> None:
        """Return nothing."""


def table_engine(table: Table, generation: str, work: Work, **options: Any) -> gk.SpeculativeEngine:
    """Create a captured engine over a table."""
    device = torch.device("cpu")
    rows = gk.ReqToTokenPool(work.running, work.context, device)
    pool = gk.MHATokenToKVPool(work.slots, work.page, torch.float32, 1, 1, 0, device)
    engine = gk.SpeculativeEngine(
        gk.EngineModel(TableForward(table), NoAttention(rows, pool)),
        ErringDrafter(table, topk=1),
        spec=gk.SpecConfig("NGRAM", STEPS, 1, STEPS + 1, page_size=work.page),
        sizes=gk.BufferSizes(
            work.running, work.context, 1, VOCAB, torch.float32, page_size=work.page
        ),
        batch_sizes=[work.running],
        device=device,
        generation=generation,  # type: ignore[arg-type]  # one of GENERATIONS
        **options,
    )
    engine.capture()
    for _ in range(work.waiting):
        engine.submit(_prompt(0), gk.SamplingParams(max_new_tokens=NEW))
    return engine


def serve(engine: gk.SpeculativeEngine) -> float:
    """Serve a round of requests; return microseconds of the thread per step and request.

    Requests that wait already are served first; as many new ones follow them.
    """
    count = PER_ROUND * engine.sizes.max_batch_size
    sampling = gk.SamplingParams(max_new_tokens=NEW)
    waiting, before = engine.stats.waiting, engine.stats
    began = time.thread_time()
    for number in range(count):
        engine.submit(_prompt(number), sampling)
    while engine.has_work and engine.stats.waiting + engine.stats.running > waiting:
        engine.step()
    taken = time.thread_time() - began
    return taken * 1e6 / (engine.stats.num_verifies - before.num_verifies)


def submit_and_abort(engine: gk.SpeculativeEngine) -> float:
    """Return microseconds of a request that is submitted and aborted before it runs."""
    count = 200
    began = time.thread_time()
    requests = [engine.submit(_prompt(number)) for number in range(count)]
    for request in requests:
        engine.abort(request)
    return (time.thread_time() - began) * 1e6 / count


def prefill(engine: gk.SpeculativeEngine, tokens: int) -> float:
    """Return microseconds per token of a prompt."""
    prompt = [number % VOCAB for number in range(tokens)]
    began = time.thread_time()
    engine.generate([prompt], gk.SamplingParams(max_new_tokens=1))
    return (time.thread_time() - began) * 1e6 / tokens


def measures(rounds: int) -> Iterator[Measure]:
    """Yield the times of all engines, and each over the first of its comparison with the bar."""
    table = Table(torch.device("cpu"))
    for generation, (grows, works) in product(GENERATIONS, COMPARISONS.items()):
        what = "host time per step and request"
        with ExitStack() as stack:
            engines = [stack.enter_context(table_engine(table, generation, work)) for work in works]
            acts = {
                str(work): _act(serve, engine) for work, engine in zip(works, engines, strict=True)
            }
            yield from _judged(f"{generation}: {grows}", what, acts, rounds)
            if grows == "waiting" and generation == "v2":
                acts = {
                    str(work): _act(submit_and_abort, engine)
                    for work, engine in zip(works, engines, strict=True)
                }
                yield from _judged("queue", "submit and abort", acts, rounds)
    work = replace(Work(), running=1, context=131_072, slots=200_000)
    with table_engine(table, "v2", work) as engine:
        acts = {f"{count:,} tokens": _act(prefill, engine, count) for count in PROMPTS}
        yield from _judged("prompt", "prefill per token", acts, rounds)


def _judged(
    setting: str, what: str, acts: dict[str, Callable[[], float]], rounds: int
) -> Iterator[Measure]:
    """Let variants take turns; yield their medians, and the later ones over the first."""
    times: dict[str, list[float]] = {name: [] for name in acts}
    for act in acts.values():
        act()  # warms up
    for turn in range(rounds):
        for name in list(acts) if turn % 2 else reversed(acts):
            times[name].append(acts[name]())
    first = median(next(iter(times.values())))
    for place, (name, each) in enumerate(times.items()):
        yield Measure(name=what, value=median(each), unit="us", setting=setting, variant=name)
        if place:
            yield Measure(
                name=f"{setting}: {name}, over the first", value=median(each) / first, unit="x",
                bar=BAR,
            )  # fmt: skip


def _act(function: Callable[..., float], *arguments: Any) -> Callable[[], float]:
    return lambda: function(*arguments)


def _prompt(number: int) -> list[int]:
    return [(number + place) % VOCAB for place in range(PROMPT)]


def report(rounds: int) -> BenchReport:
    """Measure with one thread, as an engine's thread runs it."""
    torch.set_num_threads(1)
    return BenchReport(
        name="host time of steps as the work grows",
        environment=environment(torch.device("cpu")),
        settings={
            "model": "a table of next tokens", "prompt tokens": PROMPT, "new tokens": NEW,
            "requests of a round": f"{PER_ROUND} per request that runs", "rounds": rounds,
        },
        measures=tuple(measures(rounds)),
    )  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Run the command."""
    return publish(__doc__ or "", 3, report, argv)


if __name__ == "__main__":
    sys.exit(main())
