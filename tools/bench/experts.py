"""Experts of one layer: time of both products and the weighted sum, over that of reading them.

The layer has the shape of Qwen3-30B-A3B: 128 experts, 8 of them for each row, hidden size 2,048 and
intermediate size 768, in bfloat16. An expert has 9.44 MB, so that one row reads 75.5 MB: 17.6 us at
4.3 TB/s. Batches of 8 and of 32 rows choose about 52 and 112 experts, 0.49 and 1.05 GB: 113 and 246
us. A verify of 4 rows chooses about 29. Bytes are those of the experts that random choices touch;
each call of a graph has choices of its own, which the L2 cache of an H200 (50 MB) does not hold.

Compared are

- ``graphkit``: in bfloat16, FP8 with scales of outputs and of blocks, and numbers of four bits;
  more than 64 rows also row-invariant,
- ``grouped_mm``: transformers over ``torch.nn.functional.grouped_mm``,
- ``batched_mm``: transformers over the gathered weights of each row, for few rows.

``--sweep`` compares divisions of the work instead, for the formats of ``graphkit``.

    python tools/bench/experts.py --out tools/bench/results/experts.json
    python tools/bench/experts.py --sweep --rows 1 4 8 32
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any

import torch
from quantized_linear import FORMATS, us_per_call
from report_file import add_out
from timing import show
from torch import nn
from transformers.integrations.moe import batched_mm_experts_forward, grouped_mm_experts_forward

from graphkit.cli.benchmarks import copy_bandwidth
from graphkit.graphs import environment, resolve_device
from graphkit.models.experts import _GATE, experts
from graphkit.models.quantization.linear import QuantizedExperts
from graphkit.ops.kernels import experts as kernels
from graphkit.ops.kernels.experts import ExpertTiles, choose_tiles
from graphkit.ops.kernels.quantized_linear_config import TiledProduct
from graphkit.records import BenchReport, Measure

SHAPE = 128, 8, 2048, 768
"""Experts, choices of a row, hidden and intermediate size."""
QUICK_SHAPE = 8, 2, 256, 256
ROWS = (1, 4, 8, 16, 32, 64, 128, 512, 2048)
CALLS = 12
"""Calls of a graph, with choices of their own."""
FEW_GATHERED = 8
"""Most rows of ``batched_mm``, whose gathered weights have as many copies."""
MEMORY = 4.3e12
"""Bytes per second at which the issue gives the bound."""
SWEPT = tuple(product((32, 64, 128), (2, 4, 8), (3, 4, 5, 6)))
"""Outputs, warps and stages of a program."""


class Experts(nn.Module):
    """Experts as ``use_experts_implementation`` of transformers makes them.

    Args:
        shape: As ``SHAPE``.
        device: Of the weights.
    """

    has_gate, has_bias, has_post_expert_norm = True, False, False
    is_transposed, is_concatenated, _is_expert_parallel = False, True, False

    def __init__(self, shape: tuple[int, int, int, int], device: torch.device) -> None:
        super().__init__()
        self.num_experts, self.choices, hidden, inner = shape
        sizes = {"gate_up_proj": (2 * inner, hidden), "down_proj": (hidden, inner)}
        for name, size in sizes.items():
            weight = torch.empty(self.num_experts, *size, dtype=torch.bfloat16, device=device)
            self.register_parameter(name, nn.Parameter(weight.normal_(std=0.02), False))
        self.act_fn = nn.SiLU()
        setattr(self, _GATE, {"interleaved": False, "limit": 0.0, "alpha": 1.0, "offset": 0.0})

    def _apply_gate(self, rows: torch.Tensor) -> torch.Tensor:
        gate, up = rows.chunk(2, dim=-1)
        return self.act_fn(gate) * up

    @property
    def expert_bytes(self) -> float:
        """Bytes of the weights of an expert."""
        return sum(each.nbytes for each in self.parameters()) / self.num_experts

    def quantized(self, quantize: Callable[..., Any]) -> SimpleNamespace:
        """Return the experts with weights of another format."""
        held = {
            name: QuantizedExperts([quantize(each) for each in getattr(self, name)])
            for name in ("gate_up_proj", "down_proj")
        }
        nbytes = sum(each.nbytes for w in held.values() for each in w.parameters())
        names = "has_gate", "has_post_expert_norm", "is_transposed", "num_experts", _GATE
        kept = {name: getattr(self, name) for name in names}
        return SimpleNamespace(**kept, **held, expert_bytes=nbytes / self.num_experts)


def calls(
    module: Experts, rows: int, device: torch.device
) -> tuple[list[tuple[torch.Tensor, ...]], float]:
    """Return the arguments of the calls of a graph, and the mean number of touched experts."""
    generator = torch.Generator(device).manual_seed(rows)
    options = {"generator": generator, "device": device}
    made, touched = [], 0
    for _ in range(CALLS):
        x = torch.randn(rows, module.down_proj.shape[1], **options).bfloat16()
        scores = torch.rand(rows, module.num_experts, **options)
        weights, index = scores.topk(module.choices)
        touched += len(index.unique())
        made.append((x, index, weights.bfloat16()))
    return made, touched / CALLS


def variants(module: Experts, rows: int) -> Iterator[tuple[str, Callable[..., Any], Any]]:
    """Yield each way to compute: its name, its function, and its module."""
    yield "grouped_mm", grouped_mm_experts_forward, module
    if rows <= FEW_GATHERED:
        yield "batched_mm", batched_mm_experts_forward, module
    formats = {name: module.quantized(quantize) for name, quantize in FORMATS.items()}
    for name, held in {"bfloat16": module, **formats}.items():
        yield f"graphkit {name}", partial(run_experts, False), held
        if rows > kernels.MOST_ROWS:
            yield f"graphkit {name}, row-invariant", partial(run_experts, True), held


def run_experts(row_invariant: bool, module: Any, *arguments: torch.Tensor) -> torch.Tensor:
    """Run experts, whose flag a load sets."""
    module.row_invariant = row_invariant
    return experts(module, *arguments)


def compared(
    shape: tuple[int, int, int, int], rows: Sequence[int], device: torch.device, rounds: int
) -> Iterator[Measure]:
    """Measure all ways for each number of rows."""
    bandwidth = copy_bandwidth(device) if device.type == "cuda" else MEMORY
    module = Experts(shape, device)
    for count in rows:
        arguments, touched = calls(module, count, device)
        for name, function, held in variants(module, count):
            run = [partial(function, held, *each) for each in arguments]
            us, nbytes = us_per_call(run, device, rounds), touched * held.expert_bytes
            cell = partial(Measure, setting=f"{count} rows", variant=name)
            yield cell(name="time", value=us, unit="us")
            yield cell(name="touched experts", value=touched, unit="")
            yield cell(name="read", value=nbytes / 1e6, unit="MB")
            for speed, size in (("4.3 TB/s", MEMORY), ("a copy", bandwidth)):
                over = us * size / nbytes / 1e6
                yield cell(name=f"over its bytes at {speed}", value=over, unit="x")


@contextmanager
def divided(outputs: int, warps: int, stages: int) -> Iterator[None]:
    """Let the products of experts run with another division of their work."""

    def choose(rows: int, bits: int, row_invariant: bool) -> ExpertTiles:
        usual = choose_tiles(rows, bits, row_invariant)
        few = TiledProduct(outputs, usual.few.rows, 1, warps, stages)
        if usual.many is None:
            return ExpertTiles(few, None)
        return ExpertTiles(few, TiledProduct(outputs, usual.many.rows, 1, warps, min(stages, 3)))

    kernels.choose_tiles = choose
    try:
        yield
    finally:
        kernels.choose_tiles = choose_tiles


def swept(
    shape: tuple[int, int, int, int], rows: Sequence[int], device: torch.device, rounds: int,
    divisions: Sequence[tuple[int, int, int]] = SWEPT,
) -> Iterator[Measure]:  # fmt: skip
    """Measure divisions of the work, for each format and number of rows."""
    module = Experts(shape, device)
    held: Mapping[str, Any] = {"bfloat16": module} | {
        name: module.quantized(quantize) for name, quantize in FORMATS.items()
    }
    for (name, weights), count in product(held.items(), rows):
        arguments, touched = calls(module, count, device)
        run = [partial(experts, weights, *each) for each in arguments]
        bound = touched * weights.expert_bytes / MEMORY * 1e6
        for outputs, warps, stages in divisions:
            if warps * 16 > outputs:
                continue  # several warps would convert the same numbers
            try:
                with divided(outputs, warps, stages):
                    us = us_per_call(run, device, rounds)
            except Exception as error:  # too much shared memory
                print(f"{name}, {outputs}/{warps}/{stages}: {error}"[:120], file=sys.stderr)
                continue
            yield Measure(
                name="over its bytes at 4.3 TB/s", value=us / bound, unit="x",
                setting=f"{name}, {count} rows",
                variant=f"{outputs} outputs, {warps} warps, {stages} stages",
            )  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_out(parser)
    parser.add_argument("--rounds", type=int, default=20, help="replays of each variant (20)")
    parser.add_argument("--rows", type=int, nargs="+", help="numbers of rows")
    parser.add_argument("--quick", action="store_true", help="a small layer, a few rows")
    parser.add_argument("--sweep", action="store_true", help="compare divisions of the work")
    options = parser.parse_args(argv)
    device = resolve_device("auto")
    shape = QUICK_SHAPE if options.quick else SHAPE
    rows = options.rows or ((1, 3) if options.quick else ROWS)
    with torch.no_grad():
        measure = swept if options.sweep else compared
        measures = tuple(measure(shape, rows, device, options.rounds))
    report = BenchReport(
        name="experts of a layer",
        environment=environment(device),
        settings={
            "experts": shape[0], "choices": shape[1], "hidden": shape[2], "inner": shape[3],
            "rows": ", ".join(map(str, rows)), "rounds": options.rounds,
        },
        measures=measures,
    )  # fmt: skip
    show(report, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
