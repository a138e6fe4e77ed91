"""A decode step of an 8B Llama of transformers: graphkit beside what compiles the same model.

Random bfloat16 weights, greedy, contexts of 256 tokens. A step is the difference between the least
times of ``1 + 2 * TOKENS`` and of ``1 + TOKENS`` tokens, divided by ``TOKENS``. The prompt is part
of both, and so is what a launch of several steps computes behind the last token. The bound is the
bytes of the weights at the speed of a copy.

- graphkit: ``gk.models.load`` without drafts, 64 steps per launch (v3).
- generate: dynamic cache, and static cache, whose step transformers compiles.
- max-autotune: ``torch.compile`` of the forward over a static cache, with its CUDA graphs. The next
  token is chosen on the device, in eager mode.

Compilation takes minutes. Each GPU measures one way at one batch size at a time.

    python tools/bench/decode_step.py --out tools/bench/results/decode_step.json
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import chain, product, repeat
from multiprocessing.queues import Queue

import torch
from fusion import model_of_transformers
from timing import publish
from transformers import LlamaForCausalLM, StaticCache

import graphkit as gk
from graphkit.cli.benchmarks import copy_bandwidth, synchronise
from graphkit.graphs import environment
from graphkit.records import BenchReport, Measure

BATCH_SIZES, CONTEXT, TOKENS = (1, 8), 256, 64
Generate = Callable[..., object]
"""Generates ``max_new_tokens`` tokens after the prompts."""


@contextmanager
def by_transformers(
    model: LlamaForCausalLM, ids: torch.Tensor, **options: object
) -> Iterator[Generate]:
    """Yield ``generate`` with its options."""
    yield partial(
        model.generate, ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0,
        eos_token_id=None, **options,
    )  # fmt: skip


@contextmanager
def by_max_autotune(model: LlamaForCausalLM, ids: torch.Tensor) -> Iterator[Generate]:
    """Yield a loop over the compiled forward, with a cache that stays in place."""
    step = torch.compile(model.forward, mode="max-autotune", fullgraph=True, dynamic=False)
    cache = StaticCache(config=model.config, max_cache_len=CONTEXT + 2 * TOKENS + 1)

    def generate(max_new_tokens: int) -> torch.Tensor:
        cache.reset()
        out = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        token = out.logits[:, -1:].argmax(-1)
        position = torch.full((1, 1), CONTEXT, device=ids.device)
        for _ in range(max_new_tokens - 1):
            torch.compiler.cudagraph_mark_step_begin()
            out = step(token, position_ids=position, past_key_values=cache, use_cache=True)
            token = out.logits.argmax(-1)
            position = position + 1
        return token

    yield generate


@contextmanager
def by_graphkit(model: LlamaForCausalLM, ids: torch.Tensor) -> Iterator[Generate]:
    """Yield the engine's ``generate``. Replaces modules of the model."""
    with gk.models.load(model).engine(
        algorithm="NONE", max_batch_size=len(ids), max_context_len=CONTEXT + 2 * TOKENS + 8,
        generation="v3", steps_per_launch=64, batch_sizes=[len(ids)],
    ) as engine:  # fmt: skip
        engine.capture()
        prompts = ids.tolist()
        yield lambda max_new_tokens: engine.generate(
            prompts, gk.SamplingParams(max_new_tokens=max_new_tokens)
        )


WAYS: dict[str, Callable[..., AbstractContextManager[Generate]]] = {
    "torch.compile, max-autotune": by_max_autotune,
    "generate, static cache": partial(by_transformers, cache_implementation="static"),
    "generate, dynamic cache": by_transformers,
    "graphkit": by_graphkit,
}
"""Ways to generate, by name, those that take longest to measure first."""


def seconds(generate: Generate, count: int, device: torch.device) -> float:
    """Return the time of generating a number of tokens."""
    synchronise(device)
    began = time.perf_counter()
    generate(max_new_tokens=count)
    synchronise(device)
    return time.perf_counter() - began


def measures(job: tuple[str, int], device: torch.device, shape: str, rounds: int) -> list[Measure]:
    """Measure a way at a batch size. A device without an index is the current one."""
    name, batch = job
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        model = model_of_transformers(shape, device).eval()
        read = sum(each.nbytes for each in model.parameters())
        read -= model.model.embed_tokens.weight.nbytes
        ids = torch.randint(3, model.config.vocab_size, (batch, CONTEXT), generator=generator)
        with WAYS[name](model, ids.to(device)) as generate:
            counts = 1 + TOKENS, 1 + 2 * TOKENS
            times = []
            for turn in range(2 + rounds):  # the first compiles, the second records graphs
                both = [seconds(generate, count, device) for count in counts]
                times += [both] if turn >= 2 else []
        half, whole = map(min, zip(*times, strict=True))
        ms = (whole - half) / TOKENS * 1e3
        cell = partial(Measure, setting=f"batch {batch}", variant=name)
        found = [cell(name="step", value=ms, unit="ms")]
        if device.type == "cuda":
            bound_ms = read / copy_bandwidth(device) * 1e3
            found.append(cell(name="step over its bound", value=ms / bound_ms, unit="x"))
    print(f"batch {batch}, {name}: {ms:.3f} ms", file=sys.stderr, flush=True)
    torch.compiler.reset()
    return found


def all_measures(device: torch.device, shape: str, rounds: int) -> Iterator[list[Measure]]:
    """Measure every way at every batch size, on all GPUs at the same time."""
    measure = partial(measures, shape=shape, rounds=rounds)
    jobs = list(product(WAYS, BATCH_SIZES))
    count = torch.cuda.device_count() if device.type == "cuda" else 1
    if count == 1:
        yield from (measure(job, device) for job in jobs)
        return
    context = multiprocessing.get_context("spawn")
    indices = context.Queue()
    for index in range(count):
        indices.put(index)
    with ProcessPoolExecutor(count, context, _take_device, (indices,)) as pool:
        yield from pool.map(measure, jobs, repeat(torch.device("cuda")))


def _take_device(indices: Queue[int]) -> None:
    """Select a GPU that no other process of the pool uses."""
    torch.cuda.set_device(indices.get())


def report(rounds: int, device: torch.device, shape: str = "llama-8b") -> BenchReport:
    """Measure a model of a shape."""
    return BenchReport(
        name="decode step of a model of transformers",
        environment=environment(device),
        settings={"shape": shape, "dtype": "bfloat16", "context": CONTEXT, "tokens": TOKENS,
                  "rounds": rounds},
        measures=tuple(chain.from_iterable(all_measures(device, shape, rounds))),
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(publish(__doc__ or "", 5, report, None, has_device=True))
