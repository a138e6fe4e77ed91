"""A decode step of an 8B Llama of transformers: graphkit beside what compiles the same model.

Random bfloat16 weights, greedy, contexts of 256 tokens. A step is the difference between the least
times of ``1 + 2 * TOKENS`` and of ``1 + TOKENS`` tokens, divided by ``TOKENS``. The prompt is part
of both, and so is what a launch of several steps computes behind the last token. The bound is the
bytes of the weights at the speed of a copy.

- graphkit: ``gk.hf.load`` without drafts, 64 steps per launch (v3).
- generate: dynamic cache, and static cache, whose step transformers compiles.
- max-autotune: ``torch.compile`` of the forward over a static cache, with its CUDA graphs. The next
  token is chosen on the device, in eager mode.

Compilation takes minutes. With a GPU for each batch size, all are measured at the same time.

    python tools/bench/decode_step.py --out tools/bench/results/decode_step.json
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import chain

import torch
from fusion import model_of_transformers
from timing import publish
from transformers import LlamaForCausalLM, StaticCache

import graphkit as gk
from graphkit.benchmarks import copy_bandwidth, synchronise
from graphkit.graphs import environment
from graphkit.records import BenchReport, Measure

BATCH_SIZES, CONTEXT, TOKENS = (1, 8), 256, 64
Generate = Callable[[int], object]
"""Generates a number of tokens after the prompts."""


def max_autotune(model: LlamaForCausalLM, ids: torch.Tensor) -> Generate:
    """Return a loop over the compiled forward, with a cache that stays in place."""
    step = torch.compile(model.forward, mode="max-autotune", fullgraph=True, dynamic=False)
    cache = StaticCache(config=model.config, max_cache_len=CONTEXT + 2 * TOKENS + 1)

    def generate(count: int) -> torch.Tensor:
        cache.reset()
        out = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        token = out.logits[:, -1:].argmax(-1)
        position = torch.full((1, 1), CONTEXT, device=ids.device)
        for _ in range(count - 1):
            torch.compiler.cudagraph_mark_step_begin()
            out = step(token, position_ids=position, past_key_values=cache, use_cache=True)
            token = out.logits.argmax(-1)
            position = position + 1
        return token

    return generate


def ways(model: LlamaForCausalLM, batch: int) -> Iterator[tuple[str, Generate]]:
    """Yield each way to generate with its name. The last one replaces modules of the model."""
    device = model.device
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(3, model.config.vocab_size, (batch, CONTEXT), generator=generator)
    ids = prompts.to(device)

    def generate(count: int, **options: object) -> object:
        return model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0,
            eos_token_id=None, max_new_tokens=count, **options,
        )  # fmt: skip

    yield "generate, dynamic cache", generate
    yield "generate, static cache", partial(generate, cache_implementation="static")
    yield "torch.compile, max-autotune", max_autotune(model, ids)
    with gk.hf.load(model).engine(
        algorithm="NONE", max_batch_size=batch, max_context_len=CONTEXT + 2 * TOKENS + 8,
        generation="v3", steps_per_launch=64, batch_sizes=[batch],
    ) as engine:  # fmt: skip
        engine.capture()
        yield (
            "graphkit",
            lambda count: engine.generate(
                prompts.tolist(), gk.SamplingParams(max_new_tokens=count)
            ),
        )


def seconds(generate: Generate, count: int, device: torch.device) -> float:
    """Return the time of generating a number of tokens."""
    synchronise(device)
    began = time.perf_counter()
    generate(count)
    synchronise(device)
    return time.perf_counter() - began


def measures(batch: int, device: torch.device, shape: str, rounds: int) -> list[Measure]:
    """Measure every way at a batch size."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    found: list[Measure] = []
    with torch.no_grad():
        model = model_of_transformers(shape, device).eval()
        read = sum(each.nbytes for each in model.parameters())
        read -= model.model.embed_tokens.weight.nbytes
        bound_ms = read / copy_bandwidth(device) * 1e3 if device.type == "cuda" else None
        for name, generate in ways(model, batch):
            counts = 1 + TOKENS, 1 + 2 * TOKENS
            times = []
            for turn in range(2 + rounds):  # the first compiles, the second records graphs
                both = [seconds(generate, count, device) for count in counts]
                times += [both] if turn >= 2 else []
            half, whole = map(min, zip(*times, strict=True))
            ms = (whole - half) / TOKENS * 1e3
            cell = partial(Measure, setting=f"batch {batch}", variant=name)
            found.append(cell(name="step", value=ms, unit="ms"))
            if bound_ms:
                found.append(cell(name="step over its bound", value=ms / bound_ms, unit="x"))
            print(f"batch {batch}, {name}: {ms:.3f} ms", file=sys.stderr, flush=True)
    torch.compiler.reset()
    return found


def measured_batches(shape: str, device: torch.device, rounds: int) -> list[Sequence[Measure]]:
    """Measure all batch sizes, at the same time if each can have a GPU."""
    measure = partial(measures, shape=shape, rounds=rounds)
    count = len(BATCH_SIZES)
    if device.type != "cuda" or torch.cuda.device_count() < count:
        return [measure(batch, device) for batch in BATCH_SIZES]
    devices = [torch.device("cuda", index) for index in range(count)]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(count, mp_context=context) as pool:
        return list(pool.map(measure, BATCH_SIZES, devices))


def report(rounds: int, device: torch.device, shape: str = "llama-8b") -> BenchReport:
    """Measure a model of a shape."""
    return BenchReport(
        name="decode step of a model of transformers",
        environment=environment(device),
        settings={"shape": shape, "dtype": "bfloat16", "context": CONTEXT, "tokens": TOKENS,
                  "rounds": rounds},
        measures=tuple(chain.from_iterable(measured_batches(shape, device, rounds))),
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(publish(__doc__ or "", 5, report, None, has_device=True))
