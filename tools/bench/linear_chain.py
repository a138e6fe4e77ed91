"""Decoder layers of few rows: products by cuBLAS, by ``graphkit.ops``, and with quantised weights.

The layers have the shapes of Llama-3.1-8B, and run one after the other in one CUDA graph, with all
that is between their products: each kernel waits for the one before it. The ops apply the gate, and
leave the sum of parts of the inputs to the kernels behind them. Attention reads 256 keys of
each request, which has up to 8 rows. Compared are, in bfloat16,

- ``bfloat16``: ``torch.nn.functional.linear``, the library of the device,
- ``linear``: ``graphkit.ops.linear`` over the same weights,
- ``fp8 channel``, ``fp8 blocks``, ``int4``: ``graphkit.ops.quantized_linear`` per layout, as fast
  as the number of rows allows; ``fp8 channel, row-invariant`` and so on: with bits that do not
  depend on the rows,
- ``humming fp8``, ``humming int4``: ``humming-kernels``, if it is installed and CUDA is there, with
  scales of each output, and of groups of 128 inputs with zero points.

The bound is the bytes of the weights and their scales at the speed of a copy.

``--sweep`` compares launch configurations instead: one product at a time, while the others run as
``choose_product`` has it. It gives the five best of each product beside the present choice, which
decide how ``quantized_linear_config.py`` and the modules ``streamed_*_config.py`` divide the work.
A product by itself is no measure of that: it starts while no kernel runs, and its weight may be
requested earlier.

    python tools/bench/linear_chain.py --out tools/bench/results/linear_chain.json
    python tools/bench/linear_chain.py --sweep --formats "fp8 channel" int4 --rows 8 48
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch
from linear_chain_sweep import sweep
from linear_layers import (
    COUNT,
    HUMMING,
    Chain,
    Layer,
    Multiply,
    by_humming,
    by_op,
    by_torch,
    make_humming_layers,
    make_layers,
    nbytes_of,
)
from quantized_linear import KINDS, LAYERS, random_inputs, us_per_call
from report_file import add_out
from timing import show

from graphkit.cli.benchmarks import copy_bandwidth
from graphkit.graphs import environment, resolve_device
from graphkit.records import BenchReport, Measure

ROWS = (1, 4, 8, 16, 32, 48, 64, 128)
SWEPT_ROWS = (8, 16, 48)
SMALL = {"qkv": (512, 256), "o": (256, 256), "gate_up": (1024, 256), "down": (256, 512)}


def compared(
    shapes: Mapping[str, tuple[int, int]],
    kinds: Sequence[str],
    rows: Sequence[int],
    device: torch.device,
    rounds: int,
) -> Iterator[Measure]:
    """Measure a layer for each number of rows and each kind of weight, cuBLAS first."""
    bandwidth = copy_bandwidth(device) if device.type == "cuda" else None
    ways: list[tuple[str, str, Multiply]] = [("bfloat16", "linear", by_torch)]
    for kind in kinds:
        ways.append((kind, kind, partial(by_op, kind=kind)))
        if kind != "linear":
            multiply = partial(by_op, kind=kind, row_invariant=True)
            ways.append((f"{kind}, row-invariant", kind, multiply))
    if device.type == "cuda" and importlib.util.find_spec("humming"):
        ways += [(config, config, by_humming) for config in HUMMING]
    plain: dict[int, float] = {}
    made, layers = "", list[Layer]()
    for variant, kind, multiply in ways:
        if kind != made:
            make = make_humming_layers if kind in HUMMING else make_layers
            made, layers = kind, make(shapes, kind, COUNT, device)
        for count in rows:
            x = random_inputs(shapes["qkv"], count, device)[1]
            run = partial(Chain(layers, x).run, multiply)
            us = us_per_call([run], device, rounds) / COUNT
            plain.setdefault(count, us)
            cell = partial(Measure, setting=f"layer, {count} rows", variant=variant)
            yield cell(name="time", value=us, unit="us")
            yield cell(name="over bfloat16", value=us / plain[count], unit="x")
            if bandwidth is not None:
                bound = nbytes_of(layers[0]) / bandwidth * 1e6
                yield cell(name="over its bound", value=us / bound, unit="x")


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_out(parser)
    parser.add_argument("--rounds", type=int, default=20, help="replays of each variant (20)")
    parser.add_argument("--rows", type=int, nargs="+", help="numbers of rows")
    parser.add_argument("--formats", choices=KINDS, nargs="+", default=KINDS, help="weights")
    parser.add_argument("--sweep", action="store_true", help="compare configurations instead")
    parser.add_argument("--device", default="auto", help="device to run on; default: auto")
    options = parser.parse_args(argv)
    device = resolve_device(options.device)
    is_cuda = device.type == "cuda"
    if options.sweep and not is_cuda:
        parser.error("--sweep needs a CUDA device: it launches the kernel.")
    shapes, usual = (LAYERS, ROWS) if is_cuda else (SMALL, ROWS[:2])
    rows = options.rows or (SWEPT_ROWS if options.sweep else usual)
    measure = sweep if options.sweep else compared
    with torch.no_grad():
        found = tuple(measure(shapes, options.formats, rows, device, options.rounds))
    report = BenchReport(
        name="decoder layers of few rows",
        environment=environment(device),
        settings={"rounds": options.rounds, "layers": COUNT},
        measures=found,
    )
    show(report, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
