"""Products of few rows, with quantised weights and others: time per call, over that of reading.

The layers have the shapes of Llama-3.1-8B. Calls are measured in one CUDA graph that passes over as
many copies of a weight as the L2 cache does not hold. Compared are, for 1 to 256 rows in bfloat16,

- ``bfloat16``: ``torch.nn.functional.linear``, the library of the device,
- ``linear``: ``graphkit.ops.linear`` over the same weight,
- ``fp8 channel``, ``fp8 blocks``, ``int4``: ``graphkit.ops.quantized_linear`` per layout,
- ``_scaled_mm``: ``torch._scaled_mm`` with scales of each output, over rows that are rounded to
  float8 before, which is part of its time.

The bound is the bytes of the weight and its scales at the speed of a copy.

    python tools/bench/quantized_linear.py --out tools/bench/results/quantized_linear.json
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from statistics import median

import torch
from report_file import add_out
from timing import show
from torch.nn.functional import linear

from graphkit.cli.benchmarks import copy_bandwidth, device_ms
from graphkit.graphs import environment, resolve_device
from graphkit.models.quantization.weight import QuantizedWeight, quantize_fp8, quantize_int4
from graphkit.ops.quantized_layout import blocks
from graphkit.ops.registration import OPS, RegisteredOp
from graphkit.records import BenchReport, Measure

LAYERS = {
    "qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336),
}  # fmt: skip
"""Outputs and inputs of the linear layers of Llama-3.1-8B, merged as graphkit merges them."""
QUICK_LAYERS = {"small": (192, 256)}
ROWS = (1, 4, 8, 16, 32, 64, 128, 256)
COLD_BYTES = 200 * 2**20
"""Bytes of all copies of a weight: four times the L2 cache of an H200."""
Call = Callable[[], object]


def blocks_of_fp8(weight: torch.Tensor) -> QuantizedWeight:
    """Return the FP8 weight with scales of blocks: as many bytes as trained ones."""
    channel = quantize_fp8(weight)
    outputs, inputs = weight.shape
    scale = channel.scale.mean().expand(blocks(outputs), blocks(inputs)).contiguous()
    return QuantizedWeight(channel.numbers, scale, None, inputs)


FORMATS: Mapping[str, Callable[[torch.Tensor], QuantizedWeight]] = {
    "fp8 channel": quantize_fp8,
    "fp8 blocks": blocks_of_fp8,
    "int4": quantize_int4,
}


KINDS = ("linear", *FORMATS)
"""What the kernel multiplies with: a weight of 16 bits, and the formats."""


def op_and_tensors(
    kind: str, weight: torch.Tensor
) -> tuple[RegisteredOp, list[torch.Tensor | None]]:
    """Return the op of a kind of weight, and the tensors of the weight that it reads."""
    if kind not in FORMATS:
        return OPS["linear"], [weight]
    quantized = FORMATS[kind](weight)
    tensors = [quantized.numbers, quantized.scale, quantized.zero_point]
    return OPS["quantized_linear"], tensors


def copies(tensors: Sequence[torch.Tensor | None], device: torch.device) -> list[list[object]]:
    """Return as many copies of the tensors as the cache does not hold; one on the CPU."""
    nbytes = sum(each.nbytes for each in tensors if each is not None)
    count = max(2, -(-COLD_BYTES // nbytes)) if device.type == "cuda" else 1
    return [[None if t is None else t.clone() for t in tensors] for _ in range(count)]


def us_per_call(calls: Sequence[Call], device: torch.device, rounds: int) -> float:
    """Return the median microseconds of a call, from a graph of all of them."""
    run: Call = partial(_run_all, calls)
    run()
    if device.type == "cuda":
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        run = graph.replay
        run()
    times = []
    for _ in range(rounds):
        with device_ms(device) as ms:
            run()
        times.append(ms[0] * 1e3 / len(calls))
    return median(times)


def _run_all(calls: Sequence[Call]) -> None:
    for call in calls:
        call()


def scaled_mm(x: torch.Tensor, numbers: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Round rows to float8 and multiply them by ``torch._scaled_mm``."""
    factor = x.float().abs().amax(1, keepdim=True).clamp(min=1e-12) / 448
    rows = (x / factor).to(torch.float8_e4m3fn)
    return torch._scaled_mm(rows, numbers.t(), factor, scale.t(), out_dtype=x.dtype)


def variants(
    weight: torch.Tensor, x: torch.Tensor, device: torch.device
) -> Iterator[tuple[str, int, list[Call]]]:
    """Yield the name, the bytes of the weight and the calls of each variant."""
    yield "bfloat16", weight.nbytes, [partial(linear, x, w) for (w,) in copies([weight], device)]
    for name in KINDS:
        op, parts = op_and_tensors(name, weight)
        nbytes = sum(each.nbytes for each in parts if each is not None)
        call = getattr(torch.ops.graphkit, op.name)
        yield name, nbytes, [partial(call, x, *each) for each in copies(parts, device)]
        if name == "fp8 channel" and device.type == "cuda":
            yield (
                "_scaled_mm",
                nbytes,
                [partial(scaled_mm, x, *each) for each in copies(parts[:2], device)],
            )


def compared(
    layers: Mapping[str, tuple[int, int]], rows: Sequence[int], device: torch.device, rounds: int
) -> Iterator[Measure]:
    """Measure all variants of each layer and number of rows."""
    bandwidth = copy_bandwidth(device) if device.type == "cuda" else None
    for (name, shape), count in product(layers.items(), rows):
        weight, x = random_inputs(shape, count, device)
        plain = 0.0
        for variant, nbytes, calls in variants(weight, x, device):
            us = us_per_call(calls, device, rounds)
            plain = plain or us
            cell = partial(Measure, setting=f"{name}, {count} rows", variant=variant)
            yield cell(name="time", value=us, unit="us")
            yield cell(name="over bfloat16", value=us / plain, unit="x")
            yield cell(name="weight", value=nbytes / 1e6, unit="MB")
            if bandwidth is not None:
                yield cell(name="over its bound", value=us * bandwidth / nbytes / 1e6, unit="x")


def random_inputs(
    shape: tuple[int, int], rows: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a weight and rows in bfloat16."""
    generator = torch.Generator(device).manual_seed(0)
    options = {"generator": generator, "device": device, "dtype": torch.bfloat16}
    return torch.randn(shape, **options), torch.randn(rows, shape[1], **options)


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_out(parser)
    parser.add_argument("--rounds", type=int, default=20, help="replays of each variant (20)")
    parser.add_argument("--rows", type=int, nargs="+", help="numbers of rows")
    parser.add_argument("--quick", action="store_true", help="one small layer, a few rows")
    options = parser.parse_args(argv)
    device = resolve_device("auto")
    layers = QUICK_LAYERS if options.quick else LAYERS
    rows = options.rows or ((1, 3) if options.quick else ROWS)
    with torch.no_grad():
        found = list(compared(layers, rows, device, options.rounds))
    report = BenchReport(
        name="products with quantised weights",
        environment=environment(device),
        settings={"rows": ", ".join(map(str, rows)), "rounds": options.rounds},
        measures=tuple(found),
    )
    show(report, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
