"""Host and GPU time of replaying a verify step, compared with other implementations.

All variants run the same forward on the same batch in one process: 8 fields from the host and one
[T, 4096] bf16 field on the device, for 48 requests of 4 tokens, padded to 64. Each of them copies
the same host arrays into place, pads the tail if it pads at all, and runs the forward.

    python tools/bench/refresh.py --out tools/bench/results/refresh.json
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from statistics import median

import numpy as np
import torch
from baselines import baselines
from timing import Variant, api_calls, host_us, kernel_us, publish
from verify_step import (
    CAPTURED,
    DEVICE,
    HIDDEN,
    LAYERS,
    LIVE,
    WIDTH,
    Model,
    StepInputs,
    graphkit_runner,
    host_arrays,
)  # fmt: skip

import graphkit as gk
from graphkit.graphs import environment
from graphkit.records import BenchReport, Measure
from graphkit.runners import StagedBatch

BARE = "bare CUDAGraph.replay() of graphkit's graph"
STAGED = "graphkit staged.replay()"
NUMPY = "graphkit replay(numpy)"
TORCH = "graphkit replay(CPU tensors)"
GATHERED = "graphkit: gather eight fields, build a batch, replay"
GATHERED_STAGED = "graphkit: gather eight fields into stage(), replay"


def graphkit_variants(runner: gk.TargetVerifyRunner, embeds: torch.Tensor) -> dict[str, Variant]:
    """Return the variants of graphkit, and a bare launch of the same graph."""
    arrays = host_arrays()
    from_numpy = StepInputs(**arrays, input_embeds=embeds)
    tensors = {name: torch.from_numpy(rows) for name, rows in arrays.items()}
    from_torch = StepInputs(**tensors, input_embeds=embeds)
    (graph,) = runner.backend.pool.graphs  # no other runner uses this backend

    def stage() -> StagedBatch[gk.ForwardOutput]:
        staged = runner.stage(LIVE)
        staged.req_pool_indices[:] = arrays["req_pool_indices"]
        staged.seq_lens[:] = arrays["seq_lens"]
        staged.input_ids[:] = arrays["input_ids"]
        staged.positions[:] = arrays["positions"]
        staged.out_cache_loc[:] = arrays["out_cache_loc"]
        staged.temperatures[:] = arrays["temperatures"]
        staged.top_ps[:] = arrays["top_ps"]
        staged.adapter_ids[:] = arrays["adapter_ids"]
        staged.input_embeds = embeds
        return staged

    # A scheduler gathers the running requests from its own arrays, in their present order.
    orders = {size: np.arange(size)[::-1].copy() for size in (LIVE, LIVE * WIDTH)}
    gathers = [(name, rows, orders[len(rows)]) for name, rows in arrays.items()]

    def gather_and_replay() -> None:
        rows = {name: np.take(rows, order, mode="clip") for name, rows, order in gathers}
        runner.replay(StepInputs(**rows, input_embeds=embeds))

    def gather_into_stage() -> None:
        staged = runner.stage(LIVE)
        for name, rows, order in gathers:
            np.take(rows, order, out=getattr(staged, name), mode="clip")
        staged.input_embeds = embeds
        staged.replay()

    def post_pads() -> None:
        with runner.buffers.posted():
            pass

    return {
        BARE: Variant(lambda _: graph.graph.replay(), prepare=post_pads),
        STAGED: Variant(lambda staged: staged.replay(), prepare=stage),
        "graphkit stage(), copy eight arrays, replay()": Variant(lambda _: stage().replay()),
        GATHERED: Variant(lambda _: gather_and_replay()),
        GATHERED_STAGED: Variant(lambda _: gather_into_stage()),
        NUMPY: Variant(lambda _: runner.replay(from_numpy)),
        TORCH: Variant(lambda _: runner.replay(from_torch)),
    }


def first_replay(model: Model, embeds: torch.Tensor) -> list[Measure]:
    """Compare the first replay after a capture with the median of the next hundred."""
    runner = graphkit_runner(model, [CAPTURED])
    replay = graphkit_variants(runner, embeds)[NUMPY].act
    host, whole = zip(*(_timed(replay) for _ in range(101)), strict=True)
    runner.close()
    return [
        Measure(name="first replay, host", value=host[0], unit="us"),
        Measure(
            name="first replay over median, results awaited",
            value=whole[0] / median(whole[1:]),
            unit="x",
            bar=2,
        ),
    ]


def _timed(replay: Callable[[None], object]) -> tuple[float, float]:
    """Return the microseconds until a replay returns, and until its results are ready."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    replay(None)
    returned = time.perf_counter()
    torch.cuda.synchronize()
    return (returned - began) * 1e6, (time.perf_counter() - began) * 1e6


def pool_ratio(model: Model) -> float:
    """Return the pool bytes of all default sizes divided by those of the largest size alone."""
    alone, every = graphkit_runner(model, [CAPTURED]), graphkit_runner(model, None)
    ratio = every.backend.pool.num_bytes() / alone.backend.pool.num_bytes()
    alone.close()
    every.close()
    return ratio


def measures(rounds: int) -> list[Measure]:
    """Return all measures of the report."""
    model = Model()
    embeds = torch.randn(LIVE * WIDTH, HIDDEN, dtype=torch.bfloat16, device=DEVICE)
    runner = graphkit_runner(model, [CAPTURED])
    variants = graphkit_variants(runner, embeds)
    host = host_us({**variants, **baselines(model, embeds)}, rounds)
    bare = host[BARE]
    calls = api_calls(variants[NUMPY])
    kernels = kernel_us(variants[NUMPY])
    added = {
        name: kernels[name] for name in ("fetch_kernel", "copy_kernel", "paged_metadata_kernel")
    }
    return [
        *(Measure(name=f"host: {name}", value=value, unit="us") for name, value in host.items()),
        Measure(name="staged.replay() over bare", value=host[STAGED] / bare, unit="x", bar=1.5),
        Measure(name="replay(numpy) over bare", value=host[NUMPY] / bare, unit="x", bar=3),
        Measure(name="replay(CPU tensors) over bare", value=host[TORCH] / bare, unit="x", bar=5),
        Measure(
            name="gathered into stage() over gathered and replayed",
            value=host[GATHERED_STAGED] / host[GATHERED],
            unit="x",
            bar=1,
        ),
        *(Measure(name=f"calls of {n} per replay", value=c, unit="") for n, c in calls.items()),
        Measure(name="CUDA API calls per replay", value=sum(calls.values()), unit="", bar=1),
        *(Measure(name=f"GPU: {name}", value=value, unit="us") for name, value in added.items()),
        Measure(name="GPU: refresh and metadata", value=sum(added.values()), unit="us", bar=10),
        *first_replay(model, embeds),
        Measure(name="pool of all sizes over largest", value=pool_ratio(model), unit="x", bar=1.1),
    ]  # fmt: skip


def report(rounds: int) -> BenchReport:
    """Run the benchmark and return its report."""
    torch.manual_seed(0)
    return BenchReport(
        name="refresh: one verify step, 8 host fields and one [T, 4096] bf16 device field",
        environment=environment(DEVICE),
        settings={
            "live": LIVE,
            "captured": CAPTURED,
            "tokens per request": WIDTH,
            "layers": LAYERS,
            "rounds": rounds,
        },
        measures=tuple(measures(rounds)),
    )


def main(argv: list[str] | None = None) -> int:
    """Run the command."""
    return publish(__doc__ or "", 7, report, argv)


if __name__ == "__main__":
    sys.exit(main())
