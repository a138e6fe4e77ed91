"""Attention over a paged cache: time per call and bytes of the cache per second.

A call is one layer of a verify with 4 rows per request, 32 query heads, 8 key-value heads and head
size 128 in bfloat16; with ``FP8`` over a cache of float8_e4m3fn, and with ``MLA`` of 128 query
heads over latents of 512 + 64, also with one row per request. Calls are measured in one CUDA graph,
over enough layers that the L2 cache does not help. Compared are

- ``paged_attention``: the op alone, without and with ``row_invariant``,
- ``TritonAttention`` and ``SdpaAttention``: ``attend`` of a backend, which also stores the rows,
- ``torch SDPA``: ``scaled_dot_product_attention`` over dense copies of the cache.

``--sweep`` compares launch configurations of the kernel instead, see ``attention_sweep.py``, and
``--sweep fp8`` those over a cache of float8_e4m3fn alone, in less than a minute.

    python tools/bench/attention.py --out tools/bench/results/attention.json
    python tools/bench/attention.py --sweep --out attention_sweep.json
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product

import torch
from attention_batch import BACKENDS, FP8, GQA, MLA, USUAL_ROWS, Batch, Condition
from attention_sweep import sweep, sweep_float8
from attention_timing import Calls
from report_file import add_out
from timing import show

from graphkit.engine.attention import SdpaAttention
from graphkit.graphs import environment, resolve_device
from graphkit.records import BenchReport, Measure

CONTEXTS, BATCH_SIZES, PAGE_SIZES = (1024, 8192, 32768), (1, 8, 32), (16, 1, 64)
"""Other page sizes than the first are measured at ``BAR_CONTEXT`` alone."""
QUICK = ((64,), (1, 2), (16, 1))
FP8_QUICK, FP8_PAGE_SIZE, FP8_ROWS = Condition(64, 2, False, 16, FP8), 16, (USUAL_ROWS, 6)
MLA_QUICK, MLA_CONTEXT, MLA_PAGE_SIZES = Condition(64, 2, True, 16, MLA), 8192, (16, 64)
BARS = {1: 3.0, 8: 4.0, 32: 4.3}
"""Least TB/s of ``paged_attention`` at 8k context, by batch size."""
MLA_BARS = {32: 2.5}
"""As ``BARS``, for one row per request. With 128 heads a row multiplies 242 times per byte of the
cache: 2.5 TB/s are 600 TFLOP/s, and four rows would need 2,400, more than the device has."""
FP8_BAR = 0.6
"""Most time of ``paged_attention`` over FP8 as a multiple of its time over bfloat16, if several
requests occupy the device."""
BAR_CONTEXT = 8192
LONG, LONG_BAR = Condition(131072, 1, False, 16), 4.0
PROMPTS = [Condition(context, 1, False, 16, GQA, 2048) for context in (8192, 32768)]
"""A chunk of 2,048 tokens of a prompt. Its products count, not the bytes of the cache."""
SDPA_PAGE_SIZE = 16
"""The one page size at which ``SdpaAttention`` and torch run: their time does not depend on it."""


def conditions(quick: bool) -> list[Condition]:
    """Return the batches to measure."""
    contexts, batch_sizes, page_sizes = QUICK if quick else (CONTEXTS, BATCH_SIZES, PAGE_SIZES)
    sizes = [
        (context, *others)
        for context, *others in product(contexts, batch_sizes, (False, True), page_sizes)
        if quick or context == BAR_CONTEXT or others[-1] == page_sizes[0]
    ]
    latent = [
        Condition(MLA_CONTEXT, batch_size, tree, page_size, MLA, rows)
        for batch_size, page_size in product(BATCH_SIZES, MLA_PAGE_SIZES)
        for tree, rows in ((False, 1), (False, 4), (True, 4))
    ]
    narrow = [
        Condition(BAR_CONTEXT, batch_size, False, FP8_PAGE_SIZE, shape, rows)
        for rows, shape, batch_size in product(FP8_ROWS, (GQA, FP8), BATCH_SIZES)
    ]
    more = [FP8_QUICK, MLA_QUICK] if quick else [LONG, *PROMPTS, *narrow, *latent]
    return list(dict.fromkeys([Condition(*each) for each in sizes] + more))


def measures(cases: Sequence[Condition], device: torch.device, rounds: int) -> Iterator[Measure]:
    """Measure all variants of each condition, FP8 after the same one in bfloat16."""
    times: dict[Condition, float] = {}
    for condition in cases:
        began = time.perf_counter()
        speeds = measured(condition, device, rounds)
        times[condition] = speeds["paged_attention"]
        for name, us in speeds.items():
            read = tb_per_s(condition, us)
            values = [("time per call", us, "us"), ("cache read", read, "TB/s")]
            if condition.shape is MLA or condition in PROMPTS:
                values.append(("products", condition.products / us / 1e6, "TFLOP/s"))
            for what, value, unit in values:
                yield Measure(
                    name=what, value=value, unit=unit, setting=str(condition), variant=name
                )
        note(f"{condition} ({time.perf_counter() - began:.1f} s)")
        if condition.shape is FP8:
            ratio = times[condition] / times[replace(condition, shape=GQA)]
            bar = FP8_BAR if condition.batch_size > 1 and condition.rows == USUAL_ROWS else None
            yield Measure(name=f"{condition}: time over bfloat16", value=ratio, unit="x", bar=bar)
            continue
        least = (MLA_BARS if condition.shape is MLA else BARS).get(condition.batch_size)
        is_judged = condition.rows == (1 if condition.shape is MLA else USUAL_ROWS)
        is_judged &= condition.context == BAR_CONTEXT
        if condition == LONG:
            least, is_judged = LONG_BAR, True
        if least and is_judged:
            read = tb_per_s(condition, speeds["paged_attention"])
            name = f"{condition}: {least} TB/s over paged_attention"
            yield Measure(name=name, value=least / read, unit="x", bar=1)


def measured(condition: Condition, device: torch.device, rounds: int) -> dict[str, float]:
    """Return the microseconds per call of each variant that has memory."""
    batch, times = Batch(condition, device), dict[str, float]()
    for name, act in variants(batch).items():
        try:
            times[name] = Calls(act, batch, rounds).us
        except torch.OutOfMemoryError:
            note(f"{condition}: no memory for {name}")
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return times


def variants(batch: Batch) -> dict[str, Callable[[int], object]]:
    """Return what is measured: each runs one layer of the batch."""
    acts: dict[str, Callable[[int], object]] = {
        "paged_attention": partial(batch.run_op, False),
        "row-invariant": partial(batch.run_op, True),
    }
    # Over FP8 both would first convert the cache.
    with_sdpa = batch.condition.page_size == SDPA_PAGE_SIZE and batch.condition.shape is not FP8
    for kind in BACKENDS:
        # It would repeat the latents for each of 128 heads.
        is_large = batch.condition.shape is MLA and batch.condition is not MLA_QUICK
        if kind is not SdpaAttention or (with_sdpa and not is_large):
            backend = batch.backend(kind)
            acts[kind.__name__] = partial(batch.attend, backend, batch.metadata(backend))
    if with_sdpa:
        acts["torch SDPA"] = batch.run_dense
    return acts


def tb_per_s(condition: Condition, us: float) -> float:
    """Return the bytes of the cache per time in TB/s."""
    return condition.cache_bytes / us / 1e6


def note(text: str) -> None:
    """Print progress."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def main(argv: list[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_out(parser)
    parser.add_argument("--rounds", type=int, default=7, help="replays of each measurement (7)")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda (auto)")
    parser.add_argument("--quick", action="store_true", help="tiny batches, to try the script")
    parser.add_argument(
        "--sweep", nargs="?", const="all", choices=("all", "fp8"),
        help="compare launch configurations: all (default), or fp8",
    )  # fmt: skip
    options = parser.parse_args(argv)
    device, began = resolve_device(options.device), time.perf_counter()
    if options.sweep and device.type != "cuda":
        parser.error("--sweep needs a CUDA device: it launches the kernel.")
    with torch.no_grad():
        if options.sweep:
            chosen = sweep_float8 if options.sweep == "fp8" else sweep
            found = tuple(chosen(device, options.rounds, note))
        else:
            found = tuple(measures(conditions(options.quick), device, options.rounds))
    report = BenchReport(
        name="attention over a paged cache" + (": launch configurations" if options.sweep else ""),
        environment=environment(device),
        settings={
            "heads": "32 over 8 of 128, or 128 over latents of 512 + 64", "dtype": "bfloat16",
            "rounds": options.rounds, "seconds": round(time.perf_counter() - began),
        },
        measures=found,
    )  # fmt: skip
    show(report, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
