"""Decoder layers of few rows: products by cuBLAS, by ``graphkit.ops``, and with quantised weights.

The layers have the shapes of Llama-3.1-8B, and run one after the other in one CUDA graph, with all
that is between their products: each kernel waits for the one before it. The ops apply the gate, and
leave the sum of parts of the inputs to the kernels behind them. Attention reads 256 keys of
each request, which has up to 8 rows. Compared are, in bfloat16,

- ``bfloat16``: ``torch.nn.functional.linear``, the library of the device,
- ``linear``: ``graphkit.ops.linear`` over the same weights,
- ``fp8 channel``, ``fp8 blocks``, ``int4``: ``graphkit.ops.quantized_linear`` per layout.

The bound is the bytes of the weights and their scales at the speed of a copy.

``--sweep`` compares launch configurations instead: one product at a time, while the others run as
``choose_product`` has it. It gives the five best of each product beside the present choice, which
decide how ``quantized_linear_config.py`` divides the work. A product by itself is no measure of
that: it starts while no kernel runs, and its weight may be requested earlier.

    python tools/bench/linear_chain.py --out tools/bench/results/linear_chain.json
    python tools/bench/linear_chain.py --sweep --formats "fp8 channel" int4 --rows 8 48
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import torch
from quantized_linear import KINDS, LAYERS, op_and_tensors, random_inputs, us_per_call
from rich.console import Console
from torch.nn.functional import linear

from graphkit.benchmarks import copy_bandwidth
from graphkit.graphs import environment, resolve_device
from graphkit.ops.decoder import add_rms_norm, rms_norm, silu_and_mul
from graphkit.ops.heads import store_rotated_heads
from graphkit.ops.kernels.quantized_linear_config import (
    FEW_ROWS,
    MOST_PLAIN_ROWS,
    Product,
    StreamedProduct,
    TiledProduct,
    blocks_of_step,
    choose_product,
    choose_splits,
    groups_of_part,
    padded,
    steps,
)
from graphkit.ops.paged_attention import paged_attention
from graphkit.ops.registration import OPS
from graphkit.records import BenchReport, Measure
from graphkit.views import bench_view

ROWS = (1, 4, 8, 16, 32, 48, 64, 128)
SWEPT_ROWS = (8, 16, 48)
COUNT = 12
"""Layers: 5 GB of weights in bfloat16."""
HEAD_SIZE, CONTEXT = 128, 256
PROCESSORS = 132
"""Multiprocessors of an H200."""
BITS = {"linear": 16, "int4": 4}
"""Bits of a number of each kind of weight; 8 for others."""
COMPILERS = 4
"""Processes that compile the configurations of a product."""
SMALL = {"qkv": (512, 256), "o": (256, 256), "gate_up": (1024, 256), "down": (256, 512)}
Tensors = Sequence[torch.Tensor | None]
Layer = Mapping[str, Tensors]
"""The tensors of the weight of each product, in the order of ``LAYERS``."""
Multiply = Callable[..., torch.Tensor]
Chosen = Mapping[str, Product]
"""The configurations of some products, by their names."""


class Chain:
    """Decoder layers over rows of requests, which have up to 8 rows each.

    Args:
        layers: The weights of each layer.
        x: The rows; above 8 a multiple of 8.
    """

    def __init__(self, layers: Sequence[Layer], x: torch.Tensor) -> None:
        self._layers, self._x = layers, x
        (rows, size), device = x.shape, x.device
        (qkv, *_), *_ = layers[0].values()
        self._heads = size // HEAD_SIZE, (len(qkv) - size) // 2 // HEAD_SIZE
        self._norm = torch.ones_like(x[0])
        self._frequencies = torch.linspace(1, 1e-4, HEAD_SIZE // 2, device=device)
        requests = -(-rows // 8)
        self._width = rows // requests
        slots = torch.arange(requests * CONTEXT, dtype=torch.int32, device=device)
        self._table = slots.view(requests, CONTEXT)
        self._lengths = torch.full((requests,), CONTEXT, dtype=torch.int32, device=device)
        self._starts = torch.arange(0, rows + 1, self._width, dtype=torch.int32, device=device)
        self._locations = self._table[:, -self._width :].flatten().long()
        shape = len(layers), 2, len(slots), self._heads[1], HEAD_SIZE
        self._caches = torch.zeros(shape, dtype=x.dtype, device=device)

    def run(self, multiply: Multiply) -> torch.Tensor:
        """Run the layers.

        Args:
            multiply: Returns the product of rows and a weight, given the product's name, gated or
                in parts on request.
        """
        norm, eps = self._norm, 1e-5
        stream, normed = self._x, rms_norm(self._x, norm, eps)
        for layer, cache in zip(self._layers, self._caches, strict=True):
            qkv, out, gate_up, down = (partial(multiply, **_named(*each)) for each in layer.items())
            query = store_rotated_heads(
                *cache, self._locations, qkv(normed, in_parts=True), self._locations,
                self._frequencies, *self._heads, dtype=stream.dtype,
            )  # fmt: skip
            attended = self._attend(query, *cache).flatten(1)
            normed, stream = add_rms_norm(out(attended, in_parts=True), stream, norm, eps)
            gated = gate_up(normed, gated=True)
            normed, stream = add_rms_norm(down(gated, in_parts=True), stream, norm, eps)
        return normed

    def _attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        return paged_attention(
            query, keys, values, self._table, self._lengths, self._starts, None, HEAD_SIZE**-0.5,
            page_size=1, max_seqlen_q=self._width,
        )  # fmt: skip


def _named(name: str, tensors: Tensors) -> dict[str, object]:
    return {"name": name, "tensors": tensors}


def by_torch(
    x: torch.Tensor, *, tensors: Tensors, gated: bool = False, **_: object
) -> torch.Tensor:
    """Multiply by the library of the device, in one part."""
    product = linear(x, *tensors)
    return silu_and_mul(product) if gated else product


def by_op(
    x: torch.Tensor,
    *,
    name: str,
    tensors: Tensors,
    kind: str,
    chosen: Chosen | None = None,
    **result: bool,
) -> torch.Tensor:
    """Multiply by the op of a kind of weight, some products with a configuration."""
    op = OPS["linear" if kind == "linear" else "quantized_linear"]
    if not chosen or name not in chosen:
        found: torch.Tensor = getattr(torch.ops.graphkit, op.name)(x, *tensors, **result)
        return found
    launched: torch.Tensor = op.launch(op.arguments(x, *tensors, **result), chosen[name])
    return launched


def make_layers(
    shapes: Mapping[str, tuple[int, int]], kind: str, count: int, device: torch.device
) -> list[Layer]:
    """Return layers with weights of a kind, of the same numbers in each layer."""
    layers: list[Layer] = [{} for _ in range(count)]
    for name, shape in shapes.items():
        weight = random_inputs(shape, 1, device)[0] / shape[1] ** 0.5
        _, tensors = op_and_tensors(kind, weight)
        for layer in layers:
            layer[name] = [None if each is None else each.clone() for each in tensors]
    return layers


def nbytes_of(layer: Layer) -> int:
    """Return the bytes of a layer's weights and scales."""
    return sum(each.nbytes for tensors in layer.values() for each in tensors if each is not None)


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
    ways += [(kind, kind, partial(by_op, kind=kind)) for kind in kinds]
    plain: dict[int, float] = {}
    for variant, kind, multiply in ways:
        layers = make_layers(shapes, kind, COUNT, device)
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


def tiled_products(shape: tuple[int, int], kind: str, rows: int) -> list[TiledProduct]:
    """Return configurations of a product whose programs all run at the same time.

    They differ in the tile of a program, its warps, the programs of a multiprocessor, and the bytes
    that these have in flight. Triton keeps ``unroll * (num_stages - 1)`` steps in the shared memory
    of a program. A step is a block of 128 inputs, or a pair of blocks for numbers of four bits.
    Further ones are the choice for devices that do not stream, with other bytes that are requested
    early.
    """
    outputs, inputs = shape
    tile = min(64, max(16 if kind == "linear" else 8, 1 << (rows - 1).bit_length()))
    width = 256 if kind == "linear" else 128
    few = [(32, 2, 4), (32, 2, 6), (32, 2, 8), (64, 2, 4), (64, 4, 2), (64, 4, 3), (64, 4, 4)]
    few += [(128, 8, 1), (128, 8, 2), (256, 8, 1)]
    many = [(64, 4, 1), (64, 4, 2), (64, 4, 3), (128, 4, 1), (128, 8, 1), (128, 8, 2), (256, 8, 1)]
    bits = BITS.get(kind, 8)
    tiled = choose_product(rows, inputs, outputs, bits, torch.device("cpu"), torch.bfloat16)
    found = []
    if isinstance(tiled, TiledProduct):
        found = [replace(tiled, early_bytes=each) for each in (0, 256, 512, 1024, 2048, 4096)]
    for tile_outputs, warps, most in few if tile <= 32 else many:
        tiles = -(-outputs // tile_outputs)
        splits = choose_splits(inputs, tiles, PROCESSORS * most, bits)
        programs = -(-tiles * splits // PROCESSORS)
        for in_flight in (65536, 131072, 196608):
            step_bytes = tile_outputs * width + tile * 256 * blocks_of_step(bits)
            depth = in_flight // (programs * step_bytes)
            unroll = 2 if depth >= 4 and steps(inputs, bits) // splits % 2 == 0 else 1
            stages = min(8, 1 + max(1, depth // unroll))
            found.append(TiledProduct(tile_outputs, tile, splits, warps, stages, unroll))
    return list(dict.fromkeys(found))


STREAMED = (32, 2), (64, 4), (128, 4), (128, 8)
"""Outputs of a program over quantised weights, and warps of each line."""
STEP_LINES, STREAMED_WARPS = (1, 2, 4), 28
"""Lines of a step, and most warps of a multiprocessor: their threads have up to 72 registers."""
STREAMED_PLAIN = (
    (64, 4, 1), (64, 4, 3), (64, 4, 4), (96, 4, 1), (112, 8, 1), (112, 8, 2), (128, 8, 1),
    (128, 8, 2), (224, 8, 1), (256, 8, 1),
)  # fmt: skip
"""Outputs and warps of a program over weights of 16 bits, and most programs of a multiprocessor."""


def streamed_ways(bits: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield outputs, warps, most programs of a multiprocessor, and lines of a step."""
    if bits == 16:
        yield from ((*each, 1) for each in STREAMED_PLAIN)
        return
    for (outputs, warps), lines in product(STREAMED, STEP_LINES):
        most = STREAMED_WARPS // (warps * lines)
        if most:
            yield outputs, warps * lines, most, lines


def streamed_products(shape: tuple[int, int], kind: str, rows: int) -> list[StreamedProduct]:
    """Return ways to stream the weight of a product, as ``tiled_products`` does others.

    There are none for more than ``FEW_ROWS`` rows, or ``MOST_PLAIN_ROWS`` with a weight of 16 bits.
    """
    outputs, inputs = shape
    bits = BITS.get(kind, 8)
    is_plain = bits == 16
    if rows > (MOST_PLAIN_ROWS if is_plain else FEW_ROWS):
        return []
    all_lines, tile = inputs * bits // 1024, 1 << (rows - 1).bit_length()
    tile = max(16 if is_plain else 8, tile)
    ahead, found = 2 if is_plain else 1, []
    for tile_outputs, warps, most, lines in streamed_ways(bits):
        tiles, spare = divmod(outputs, tile_outputs)
        if spare:
            continue
        fitting = [parts for parts in (2, 4, 7, 8) if tiles * parts <= most * PROCESSORS]
        for parts in [1, *(each for each in fitting if all_lines // each >= 4)]:
            steps, rest = divmod(all_lines, parts * lines)
            programs = -(-tiles * parts // PROCESSORS)
            stage_bytes = lines * (padded(tile_outputs) * 128 + tile * 2048 // bits)
            groups = 0 if is_plain else groups_of_part(inputs, parts)
            table_bytes = 6 * padded(tile_outputs) * groups
            for shared in (110_000, 160_000, 220_000):
                stages = (shared // min(programs, most) - table_bytes) // stage_bytes
                stages = min(12, steps + ahead, stages)
                if stages > ahead and not rest:
                    found.append(StreamedProduct(tile_outputs, tile, parts, stages, warps, lines))
    return list(dict.fromkeys(found))


def configurations(shape: tuple[int, int], kind: str, rows: int) -> list[Product]:
    """Return all configurations of a product that are compared."""
    return [*tiled_products(shape, kind, rows), *streamed_products(shape, kind, rows)]


def compile_some(name: str, shape: tuple[int, int], kind: str, rows: int, first: int) -> None:
    """Compile every ``COMPILERS``-th configuration of a product into the cache of Triton."""
    weight, x = random_inputs(shape, rows, torch.device("cuda"))
    op, tensors = op_and_tensors(kind, weight)
    for config in configurations(shape, kind, rows)[first::COMPILERS]:
        try:
            op.launch(op.arguments(x, *tensors, gated=name == "gate_up"), config)
        except Exception as error:  # a configuration that needs more shared memory, say
            print(f"{name}, {kind}, {rows}: {config}: {error}", file=sys.stderr)


def compile_cells(cells: Iterable[tuple[tuple[str, tuple[int, int]], str, int]]) -> None:
    """Compile the kernels of cells in processes of their own: it takes longer than they run."""
    context = multiprocessing.get_context("spawn")
    processes = max(1, min(14, (os.cpu_count() or 2) - 2))
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        for ((name, shape), kind, rows), first in product(cells, range(COMPILERS)):
            pool.submit(compile_some, name, shape, kind, rows, first)


def sweep(
    shapes: Mapping[str, tuple[int, int]],
    kinds: Sequence[str],
    rows: Sequence[int],
    device: torch.device,
    rounds: int,
) -> Iterator[Measure]:
    """Measure a layer with each configuration of one product; give the five best of each."""
    compile_cells(product(shapes.items(), kinds, rows))
    for kind in kinds:
        layers = make_layers(shapes, kind, COUNT, device)
        for count in rows:
            chain = Chain(layers, random_inputs(shapes["qkv"], count, device)[1])

            def us_of(
                chosen: Chosen | None,
                kind: str = kind,
                chain: Chain = chain,
            ) -> float:
                run = partial(chain.run, partial(by_op, kind=kind, chosen=chosen))
                return us_per_call([run], device, rounds) / COUNT

            for name, shape in shapes.items():
                setting = f"{name}, {kind}, {count} rows"
                taken = [(us_of(None), "present")]
                for config in configurations(shape, kind, count):
                    try:
                        taken.append((us_of({name: config}), described(config)))
                    except Exception as error:  # as in compile_some
                        print(f"{setting}: {config}: {error}", file=sys.stderr)
                best = sorted(taken[1:])[:5]
                for us, text in [taken[0], *best]:
                    yield Measure(name="layer", value=us, unit="us", setting=setting, variant=text)


def described(config: Product) -> str:
    """Return a configuration in one line."""
    if isinstance(config, StreamedProduct):
        return (
            f"streamed: {config.outputs} outputs, {config.rows} rows, "
            f"{config.splits} splits, {config.num_warps} warps, {config.num_stages} stages, "
            f"{config.lines} lines"
        )
    return (
        f"{config.outputs} outputs, {config.rows} rows, {config.splits} splits, "
        f"{config.num_warps} warps, {config.num_stages} stages, unroll {config.unroll}, "
        f"early {config.early_bytes}"
    )


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="write the report to this JSON file")
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
    Console(width=120).print(bench_view(report))
    if options.out:
        options.out.write_text(report.to_json())
    return 0


if __name__ == "__main__":
    sys.exit(main())
