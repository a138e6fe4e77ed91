"""Launch configurations of the products of ``linear_chain.py``: a layer's time with each.

A table has the five best configurations of a product beside the present choice, while the other
products run as ``choose_product`` has it.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import product

import torch
from linear_layers import COUNT, Chain, Chosen, by_op, make_layers
from quantized_linear import op_and_tensors, random_inputs, us_per_call

from graphkit.ops.kernels.quantized_linear_config import (
    Product,
    TiledProduct,
    blocks_of_step,
    choose_product,
    choose_splits,
    steps,
)
from graphkit.ops.kernels.streamed_linear_config import (
    FEW_ROWS,
    MOST_STREAMED_ROWS,
    groups_of_part,
    pieces_of_line,
)
from graphkit.ops.kernels.streamed_plain_config import FEW_PLAIN_ROWS
from graphkit.ops.kernels.streamed_product import StreamedProduct, padded, stages_in_flight
from graphkit.records import Measure

PROCESSORS = 132
"""Multiprocessors of an H200."""
BITS = {"linear": 16, "int4": 4}
"""Bits of a number of each kind of weight; 8 for others."""
COMPILERS = 4
"""Processes that compile the configurations of a product."""


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


STREAMED = (32, 1), (32, 2), (64, 2), (64, 4), (128, 4), (128, 8)
"""Outputs of a program over quantised weights, and warps of each line."""
STREAMED_BY_WARPGROUPS = (64, 4, 4), (96, 8, 2), (112, 8, 2), (128, 8, 2), (224, 16, 1)
"""As ``STREAMED_PLAIN``, over quantised weights, for many rows."""
STEP_LINES, STREAMED_WARPS = (1, 2, 4), 28
"""Lines of a step, and most warps of a multiprocessor: their threads have up to 72 registers."""
STREAMED_PLAIN = (
    (64, 4, 1), (64, 4, 3), (64, 4, 4), (96, 4, 1), (112, 8, 1), (112, 8, 2), (128, 8, 1),
    (128, 8, 2), (224, 8, 1), (256, 8, 1),
)  # fmt: skip
"""Outputs and warps of a program over weights of 16 bits, and most programs of a multiprocessor."""


def streamed_ways(bits: int, rows: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield outputs, warps, most programs of a multiprocessor, and lines of a step."""
    if bits < 16 and rows > FEW_ROWS:
        yield from ((*each, 1) for each in STREAMED_BY_WARPGROUPS)
        return
    if bits == 16:
        yield from ((*each, lines) for each, lines in product(STREAMED_PLAIN, STEP_LINES[:2]))
        return
    for (outputs, warps), lines in product(STREAMED, STEP_LINES):
        most = STREAMED_WARPS // (warps * lines)
        if most:
            yield outputs, warps * lines, most, lines


def streamed_products(shape: tuple[int, int], kind: str, rows: int) -> list[StreamedProduct]:
    """Return ways to stream the weight of a product, as ``tiled_products`` does others.

    There are none for more than ``MOST_STREAMED_ROWS``, or ``FEW_PLAIN_ROWS`` with 16 bits.
    """
    outputs, inputs = shape
    bits = BITS.get(kind, 8)
    is_plain, by_warpgroups = bits == 16, bits < 16 and rows > FEW_ROWS
    if rows > (FEW_PLAIN_ROWS if is_plain else MOST_STREAMED_ROWS):
        return []
    all_lines, tile = inputs * bits // 1024, 1 << (rows - 1).bit_length()
    tile = max(16 if is_plain else 8, tile)
    found = []
    for tile_outputs, warps, most, lines in streamed_ways(bits, rows):
        tiles, spare = divmod(outputs, tile_outputs)
        if spare:
            continue
        fitting = [parts for parts in (2, 4, 7, 8) if tiles * parts <= most * PROCESSORS]
        for parts in [1, *(each for each in fitting if all_lines // each >= 4)]:
            steps, rest = divmod(all_lines, parts * lines)
            programs = -(-tiles * parts // PROCESSORS)
            pieces = pieces_of_line(by_warpgroups, bits)
            stage_bytes = lines * (padded(tile_outputs) * 128 + tile * 2048 // bits) // pieces
            weight_bytes = lines * 128 * tile_outputs // pieces
            in_flight = stages_in_flight(weight_bytes, min(programs, most))
            groups = 0 if is_plain else groups_of_part(inputs, parts)
            table_bytes = 6 * padded(tile_outputs) * groups
            sums = 1 if is_plain or by_warpgroups else lines
            for shared in (110_000, 160_000, 220_000):
                stages = (shared // min(programs, most) - table_bytes) // stage_bytes
                stages = min(12, steps * pieces + 1, stages)
                if stages > 1 and not rest:
                    sizes = tile_outputs, tile, parts, stages, warps, lines
                    found.append(StreamedProduct(*sizes, in_flight, sums, by_warpgroups, False))
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
            op.launch(op.arguments(x, *tensors, swiglu=name == "gate_up"), config)
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
