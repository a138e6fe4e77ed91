"""Adaptive drafts against each fixed draft length and plain decoding, by batch size and acceptance.

In mixed batches, the chance of each request is one of 0.2 to 0.95, and a further variant has one
draft length for all requests of a step.

The target is a stack of matrix products whose next token is known, and each draft is right with a
chosen chance, independently of the others. Requests of a batch run to a fixed number of tokens in
device loops. On CUDA, tokens count per second; all variants take turns. On the CPU, they count per
work of the recorded graphs (``RecordedGraph.work``), which is the same in every run. The report is
written after each setting.

    python tools/bench/adaptive.py --out tools/bench/results/adaptive.json
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from statistics import median
from typing import Any
from unittest import mock

import torch
from report_file import add_out, write_report
from rich.console import Console

import graphkit as gk
from graphkit.engine.step.draft_tree import ChainTree
from graphkit.engine.step.verifier import Verifier
from graphkit.graphs import environment, resolve_device
from graphkit.graphs.recorded_graph import ELEMENTS_PER_WORK, RecordedGraph
from graphkit.ops import philox_uniform
from graphkit.records import BenchReport, Measure
from graphkit.views import bench_view

LENGTHS, ADAPTIVE, PLAIN, ONE_LENGTH = (0, 1, 3), "adaptive", "plain", "one length for all"
MIXED, MIXED_CHANCES = "mixed", (0.2, 0.95)
BATCH_SIZES, CHANCES = (1, 8, 64), (0.05, 0.5, 0.95, MIXED)
VOCAB, STEPS_PER_LAUNCH, WAVES = 64, 32, 2
BARS = {"the best fixed length": 1 / 0.99, PLAIN: 1 / 0.98, ONE_LENGTH: 1 / 1.15}
"""So much faster may be the best fixed length, plain decoding, and one length for all requests."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of the models.

    Attributes:
        hidden: Rows and columns of a weight.
        target_layers: Matrix products of the target.
        draft_layers: Matrix products of a draft and of a catch-up.
        dtype: Data type of the weights.
        tokens: New tokens of each request, by batch size.
    """

    hidden: int
    target_layers: int
    draft_layers: int
    dtype: torch.dtype
    tokens: Mapping[int, int]


SHAPES = {
    "cuda": Shape(
        hidden=4096, target_layers=256, draft_layers=10, dtype=torch.bfloat16,
        tokens={1: 256, 8: 192, 64: 128},
    ),
    "cpu": Shape(
        hidden=32, target_layers=500, draft_layers=16, dtype=torch.float32,
        tokens={1: 600, 8: 300, 64: 150},
    ),
}  # fmt: skip
"""A step of 8.6 GB of weights, and one that a CPU runs in milliseconds."""


class Layers:
    """Matrix products over token embeddings, whose result is small and is not read.

    On the CPU, where work is counted, one tensor of bytes stands for the products: its elements
    count as much, and take 1 % of the time.
    """

    def __init__(self, shape: Shape, count: int, device: torch.device) -> None:
        make = {"dtype": shape.dtype, "device": device}
        self._embedding = torch.randn(VOCAB, shape.hidden, **make)
        self._count, self._is_counted = count, device.type == "cpu"
        scale, copies = 0.5 * shape.hidden**-0.5, 0 if self._is_counted else count
        self._weights = [
            scale * torch.randn(shape.hidden, shape.hidden, **make) for _ in range(copies)
        ]

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return zeros that depend on the layers, [T, 1]."""
        hidden = self._embedding[tokens]
        if self._is_counted:
            torch.zeros(self._count * (ELEMENTS_PER_WORK + hidden.numel()), dtype=torch.uint8)
        for weight in self._weights:
            hidden = hidden @ weight
        return 0.0 * hidden[:, :1].float()


class Target:
    """A forward: each token has one successor."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self._layers = Layers(shape, shape.target_layers, device)
        self._logits = 9.0 * torch.nn.functional.one_hot(successors(device), VOCAB)

    def __call__(self, inputs: gk.TargetVerifyInputs) -> gk.ForwardOutput:
        """Return the logits of each row."""
        logits = self._logits[inputs.input_ids] + self._layers(inputs.input_ids)
        return gk.ForwardOutput(next_token_logits=logits)


class ChanceDrafter(gk.Drafter):
    """Drafts chains whose tokens are right with a chance, by request, position and depth alone."""

    def __init__(self, chance: float | str, layers: Layers) -> None:
        self._chance, self._layers = chance, layers

    def prepare(self, context: gk.EngineContext) -> None:
        """See ``Drafter.prepare``."""
        self._width, device = context.verify_width, context.device
        self._tree = ChainTree(1, self._width, context.sizes.max_batch_size, device)
        self._successors = successors(device)
        rows = len(context.req_to_token)
        self._chances = torch.full((rows,), 0.0 if self._chance == MIXED else float(self._chance))
        if self._chance == MIXED:
            least, most = MIXED_CHANCES
            # Spread over the rows, so that neighbours differ.
            self._chances = least + (most - least) * (0.618 * torch.arange(rows) % 1.0)
        self._chances = self._chances.to(device)[:, None]

    def at_length(self, context: gk.EngineContext) -> ChanceDrafter:
        """See ``Drafter.at_length``."""
        other = ChanceDrafter(self._chance, self._layers)
        other.prepare(context)
        return other

    @property
    def max_path(self) -> int:
        """All drafts and the bonus token."""
        return self._width

    def prefill(self, chunk: gk.PrefillChunk) -> None:
        """Do nothing: a draft depends on the last token alone."""

    def draft(
        self, req_pool_indices: torch.Tensor, seq_lens: torch.Tensor, bonus_tokens: torch.Tensor
    ) -> gk.DraftTree:
        """Run the layers once per draft."""
        tokens = [bonus_tokens]
        draws = philox_uniform(req_pool_indices, seq_lens, self._width)
        for depth in range(1, self._width):
            zero = self._layers(tokens[-1])[:, 0].long()
            right = self._successors[tokens[-1]] + zero
            is_right = draws[:, depth] < self._chances[req_pool_indices, 0]
            tokens.append(torch.where(is_right, right, (right + 1) % VOCAB))
        return self._tree.of(torch.stack(tokens, 1))

    def extend(self, verified: gk.Verified) -> None:
        """Run the layers over all rows of the step."""
        self._layers(verified.predict)


def successors(device: torch.device) -> torch.Tensor:
    """Return the token after each token, [V] int64."""
    return (5 * torch.arange(VOCAB, device=device) + 3) % VOCAB


class Bench:
    """Engines of one batch size and chance, one per draft length and one that adapts."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self._shape, self._device = shape, device
        self._target = Target(shape, device)
        self._draft_layers = Layers(shape, shape.draft_layers, device)

    def rates(
        self, batch_size: int, chance: float | str, rounds: int, names: Sequence[str] = ()
    ) -> tuple[dict[str, float], Mapping[int, int]]:
        """Return tokens per second, or per work, by variant, and the adaptive steps by drafts.

        Args:
            batch_size: Requests.
            chance: Chance that a draft is right, or ``MIXED``.
            rounds: Rounds of each variant, of which the median counts.
            names: Variants; by default all.
        """
        variants = {PLAIN: 0, **{f"{steps} drafts": steps for steps in LENGTHS[1:]}}
        variants[ADAPTIVE] = LENGTHS  # type: ignore[assignment]
        if chance == MIXED:
            variants[ONE_LENGTH] = LENGTHS  # type: ignore[assignment]
        found: dict[str, list[float]] = {name: [] for name in names or variants}
        with ExitStack() as stack:
            engines = {
                name: stack.enter_context(
                    self._engine(variants[name], batch_size, chance, divides=name != ONE_LENGTH)
                )
                for name in found
            }
            for engine in engines.values():
                engine.capture()
                self._rate(engine, batch_size)  # what trials cost once is no part of the rounds
            for _ in range(rounds):
                for name, engine in engines.items():
                    found[name].append(self._rate(engine, batch_size))
            drafted = engines[ADAPTIVE].stats.drafted_lengths if ADAPTIVE in engines else {}
        return {name: median(rates) for name, rates in found.items()}, drafted

    def _engine(
        self, num_steps: int | Sequence[int], batch_size: int, chance: float | str, *, divides: bool
    ) -> gk.SpeculativeEngine:
        context_len = self._shape.tokens[batch_size] + 4 * max(LENGTHS) + 8
        requests = gk.ReqToTokenPool(batch_size, context_len, self._device)
        pool = gk.MHATokenToKVPool(
            batch_size * context_len, 1, torch.float32, 1, 16, 1, self._device
        )
        kind = gk.TritonAttention if self._device.type == "cuda" else gk.SdpaAttention
        is_plain = num_steps == 0
        longest = num_steps if isinstance(num_steps, int) else max(num_steps)
        packs = Verifier.packs_rows if divides else property(lambda _: False)
        with mock.patch.object(Verifier, "packs_rows", packs):
            return gk.SpeculativeEngine(
                gk.EngineModel(self._target, kind(requests, pool)),
                None if is_plain else ChanceDrafter(chance, self._draft_layers),
                spec=gk.SpecConfig("NONE" if is_plain else "STANDALONE", num_steps, 1, longest + 1),
                sizes=gk.BufferSizes(batch_size, context_len, 8, VOCAB, torch.float32),
                batch_sizes=[batch_size],
                device=self._device,
                generation="v3",
                steps_per_launch=STEPS_PER_LAUNCH,
            )

    def _rate(self, engine: gk.SpeculativeEngine, batch_size: int) -> float:
        """Return tokens per second, or per work, while the batch is full.

        A request that ends makes room for one that waits.
        """
        prompts = [[1 + row % (VOCAB - 1)] for row in range(WAVES * batch_size)]
        sampling = gk.SamplingParams(max_new_tokens=self._shape.tokens[batch_size])
        tokens, work, run = engine.stats.new_tokens, [0.0], RecordedGraph.run

        def counted(graph: Any) -> None:
            work[0] += graph.work
            run(graph)

        with mock.patch.object(RecordedGraph, "run", counted):
            began = time.perf_counter()
            requests = [engine.submit(prompt, sampling) for prompt in prompts]
            while engine.stats.waiting:
                engine.step()
            seconds, tokens = time.perf_counter() - began, engine.stats.new_tokens - tokens
            cost = seconds if self._device.type == "cuda" else work[0]
        for request in requests:
            engine.abort(request)
        while engine.has_work:
            engine.step()
        return tokens / cost


def measures(
    device: torch.device, rounds: int, batch_sizes: Sequence[int], chances: Sequence[float | str]
) -> Iterator[tuple[Measure, ...]]:
    """Measure every batch size and chance, and yield what was found for each."""
    bench = Bench(SHAPES[device.type], device)
    unit = "tokens/s" if device.type == "cuda" else "tokens per work"
    for batch_size in batch_sizes:
        for chance in chances:
            setting = f"batch {batch_size}, acceptance {chance}"
            print(f"{time.strftime('%H:%M:%S')} {setting}", file=sys.stderr)
            rates, drafted = bench.rates(batch_size, chance, rounds)
            found = [
                Measure(name="speed", value=rate, unit=unit, setting=setting, variant=name)
                for name, rate in rates.items()
            ]
            fixed = {n: rate for n, rate in rates.items() if n not in (ADAPTIVE, ONE_LENGTH)}
            ratios = {"the best fixed length": max(fixed.values()), PLAIN: fixed[PLAIN]}
            if ONE_LENGTH in rates:
                ratios[ONE_LENGTH] = rates[ONE_LENGTH]
            found += [
                Measure(
                    name=f"{name} over {ADAPTIVE}", value=rate / rates[ADAPTIVE], unit="x",
                    bar=BARS[name], setting=setting,
                )
                for name, rate in ratios.items()
            ]  # fmt: skip
            found += [
                Measure(
                    name=f"{ADAPTIVE}, steps of {drafts} drafts", value=steps, unit="",
                    setting=setting,
                )
                for drafts, steps in drafted.items()
            ]  # fmt: skip
            yield tuple(found)


def main(argv: list[str] | None = None) -> int:
    """Run the command. The exit code is 1 if adaptive drafts miss a bar."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_out(parser)
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each variant (3)")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda (auto)")
    parser.add_argument(
        "--batch-sizes", type=int, nargs="+", default=BATCH_SIZES, help="requests (1 8 64)"
    )
    parser.add_argument(
        "--acceptance", type=lambda text: MIXED if text == MIXED else float(text), nargs="+",
        default=CHANCES,
        help="chances that a draft is right, or mixed (0.05 0.5 0.95 mixed)",
    )  # fmt: skip
    options = parser.parse_args(argv)
    device = resolve_device(options.device)
    rounds = options.rounds if device.type == "cuda" else 1  # counted work does not vary
    shape = SHAPES[device.type]
    report = BenchReport(
        name="adaptive drafts against fixed draft lengths",
        environment=environment(device),
        settings={
            "lengths": ", ".join(map(str, LENGTHS)), "hidden size": shape.hidden,
            "target layers": shape.target_layers, "draft layers": shape.draft_layers,
            "dtype": str(shape.dtype).removeprefix("torch."), "rounds": rounds,
            "tokens per request": ", ".join(map(str, shape.tokens.values())),
        },
        measures=(),
    )  # fmt: skip
    with torch.no_grad():
        for found in measures(device, rounds, options.batch_sizes, options.acceptance):
            report = replace(report, measures=(*report.measures, *found))
            write_report(report, options.out)
    Console(width=120).print(bench_view(report))
    return int(any(each.bar is not None and each.value > each.bar for each in report.measures))


if __name__ == "__main__":
    sys.exit(main())
