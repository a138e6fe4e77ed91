"""Decoder layers in bfloat16 of few rows: products by cuBLAS and by ``graphkit.ops.linear``.

The layers have the shapes of Llama-3.1-8B, and run one after the other in one CUDA graph, with the
norms, the rotation and the gate between their products: each kernel waits for the one before it.
Compared are

- ``bfloat16``: ``torch.nn.functional.linear``, the library of the device,
- ``linear``: ``graphkit.ops.linear``,
- other configurations of its kernel, for numbers of rows beyond its limit as well.

The bound is the bytes of the weights at the speed of a copy. The results decide up to how many rows
``linear`` uses its kernel, and how it divides the work (``quantized_linear_config.py``).

    python tools/bench/linear_chain.py --out tools/bench/results/linear_chain.json
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product

import torch
from quantized_linear import LAYERS, PLAIN, compile_cells, random_inputs, us_per_call
from timing import publish
from torch.nn.functional import linear

from graphkit.benchmarks import copy_bandwidth
from graphkit.graphs import environment
from graphkit.ops.decoder import add_rms_norm, rms_norm, rotated_heads, silu_and_mul
from graphkit.ops.kernels.quantized_linear_config import Product
from graphkit.ops.registration import OPS
from graphkit.records import BenchReport, Measure

ROWS = (1, 4, 8, 16, 32, 48, 64, 128)
COUNT = 12
"""Layers: 5 GB of weights."""
HEAD_SIZE = 128
SMALL = {"qkv": (512, 256), "o": (256, 256), "gate_up": (1024, 256), "down": (256, 512)}
Multiply = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def chained(
    layers: Sequence[Sequence[torch.Tensor]], x: torch.Tensor, multiply: Multiply
) -> torch.Tensor:
    """Run decoder layers without their attention: queries go to the output projection as they are.

    Args:
        layers: The weights of QKV, output, gate and up, and down projection of each layer.
        x: The rows.
        multiply: Returns the product of rows and a weight.
    """
    query_size, norm = layers[0][1].shape[1], torch.ones_like(x[0])
    heads, key_heads = (
        size // HEAD_SIZE for size in (query_size, (len(layers[0][0]) - query_size) // 2)
    )
    frequencies = torch.linspace(1, 1e-4, HEAD_SIZE // 2, device=x.device)
    positions = torch.zeros(len(x), dtype=torch.int32, device=x.device)
    stream, normed = x, rms_norm(x, norm, 1e-5)
    for qkv, out, gate_up, down in layers:
        query, _, _ = rotated_heads(multiply(normed, qkv), positions, frequencies, heads, key_heads)
        normed, stream = add_rms_norm(multiply(query.flatten(1), out), stream, norm, 1e-5)
        gated = silu_and_mul(multiply(normed, gate_up))
        normed, stream = add_rms_norm(multiply(gated, down), stream, norm, 1e-5)
    return normed


def by_configuration(
    choose: Callable[[tuple[int, int], int], Product], x: torch.Tensor, weight: torch.Tensor
) -> torch.Tensor:
    """Multiply by the kernel of ``linear`` with a configuration."""
    op, (outputs, inputs) = OPS["linear"], weight.shape
    found: torch.Tensor = op.launch(op.arguments(x, weight), choose((outputs, inputs), len(x)))
    return found


def measures(
    shapes: Mapping[str, tuple[int, int]], rows: Sequence[int], device: torch.device, rounds: int
) -> Iterator[Measure]:
    """Measure a layer for each number of rows and each way to multiply."""
    bandwidth = copy_bandwidth(device) if device.type == "cuda" else None
    compile_cells(product(shapes.values(), ["linear"], rows), device)
    variants: dict[str, Multiply] = {"bfloat16": linear, "linear": torch.ops.graphkit.linear}
    if device.type == "cuda":  # or the kernel does not run
        variants |= {name: partial(by_configuration, choose) for name, choose in PLAIN.items()}
    layers = [
        [random_inputs(shape, 1, device)[0] / shape[1] ** 0.5 for shape in shapes.values()]
        for _ in range(COUNT)
    ]
    nbytes = sum(weight.nbytes for weight in layers[0])
    for count in rows:
        x = random_inputs(shapes["qkv"], count, device)[1]
        expected, plain = chained(layers, x, linear).float(), 0.0
        for variant, multiply in variants.items():
            got = chained(layers, x, multiply).float()
            if (got - expected).norm() > 0.1 * expected.norm():
                raise AssertionError(f"{variant} computes something else at {count} rows")
            run = partial(chained, layers, x, multiply)
            us = us_per_call([run], device, rounds) / COUNT
            plain = plain or us
            cell = partial(Measure, setting=f"layer, {count} rows", variant=variant)
            yield cell(name="time", value=us, unit="us")
            yield cell(name="over bfloat16", value=us / plain, unit="x")
            if bandwidth is not None:
                yield cell(name="over its bound", value=us * bandwidth / nbytes / 1e6, unit="x")


def run(rounds: int, device: torch.device) -> BenchReport:
    """Measure on a device; on the CPU a small layer."""
    is_cuda = device.type == "cuda"
    shapes, rows = (LAYERS, ROWS) if is_cuda else (SMALL, ROWS[:2])
    return BenchReport(
        name="decoder layers of few rows",
        environment=environment(device),
        settings={"rounds": rounds, "layers": COUNT},
        measures=tuple(measures(shapes, rows, device, rounds)),
    )


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark."""
    return publish(__doc__ or "", 20, run, argv, has_device=True)


if __name__ == "__main__":
    sys.exit(main())
