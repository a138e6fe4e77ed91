"""Time to the first token and between tokens, of bursts of short and long prompts.

Every burst has many short prompts and one long one; the next burst arrives while requests of the
last one run. On the CPU, the clock is CPU time of the engine's thread, which is idle only between
bursts, so that other load on the machine does not count. On CUDA, it is the time of the wall, since
the thread waits for the device. Times between tokens are those between calls of ``step`` that
return tokens of a request.

    python tools/bench/latency.py --out tools/bench/results/latency.json
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

import numpy as np
import torch
from timing import publish

import graphkit as gk
from graphkit.graphs import environment
from graphkit.models.reference import reference_engine
from graphkit.records import BenchReport, Measure

GENERATIONS = ("v2", "v3")
RUNNING, CONTEXT, BUDGET, SHORT, LONG, NEW = 16, 1000, 256, 12, 800, 8
STEPS_BETWEEN = 6
"""Steps between two bursts."""


def traffic(generation: str, bursts: int, device: torch.device) -> dict[str, list[float]]:
    """Run bursts; return milliseconds by what they are."""
    random = np.random.default_rng(0)
    clock = time.thread_time if device.type == "cpu" else time.perf_counter
    engine = reference_engine(
        "EAGLE", num_steps=3, max_batch_size=RUNNING, max_context_len=CONTEXT, device=device,
        generation=generation, chunked_prefill_size=BUDGET, batch_sizes=[RUNNING // 2, RUNNING],
    )  # fmt: skip
    sampling = gk.SamplingParams(max_new_tokens=NEW)
    times: dict[str, list[float]] = {}
    arrived: dict[gk.Request, float] = {}
    last: dict[gk.Request, float] = {}

    def submit(length: int) -> None:
        prompt = random.integers(0, engine.sizes.vocab_size, length).tolist()
        arrived[engine.submit(prompt, sampling)] = clock()

    with engine:
        engine.capture()
        for step in range(10**6):
            if step % STEPS_BETWEEN == 0 and bursts:
                bursts -= 1
                submit(LONG)
                for _ in range(SHORT):
                    submit(int(random.integers(4, 24)))
            if not (bursts or engine.has_work):
                break
            returned, now = engine.step(), clock()
            for request, _ in returned:
                kind = "long" if len(request.prompt_ids) == LONG else "short"
                is_first = request not in last
                name = f"first token, {kind} prompt" if is_first else "between tokens"
                before = arrived[request] if is_first else last[request]
                times.setdefault(name, []).append((now - before) * 1e3)
                last[request] = now
    return times


def measures(bursts: int, device: torch.device) -> Iterator[Measure]:
    """Yield medians and 99th percentiles."""
    for generation in GENERATIONS:
        for name, each in sorted(traffic(generation, bursts, device).items()):
            for part in (50, 99):
                value = float(np.percentile(each, part))
                yield Measure(
                    name=name, value=value, unit="ms", setting=generation, variant=f"p{part}"
                )


def report(bursts: int, device: torch.device) -> BenchReport:
    """Measure with one thread."""
    torch.set_num_threads(1)
    return BenchReport(
        name="time to the first token and between tokens, of bursts",
        environment=environment(device),
        settings={
            "short prompts of a burst": SHORT, "tokens of its long prompt": LONG,
            "new tokens": NEW, "tokens of a forward": BUDGET, "bursts": bursts,
        },
        measures=tuple(measures(bursts, device)),
    )  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Run the command."""
    return publish(__doc__ or "", 6, report, argv, has_device=True)


if __name__ == "__main__":
    sys.exit(main())
