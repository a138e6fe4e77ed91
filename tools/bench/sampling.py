"""Ops over the vocabulary, which verify and draft call, beside the same with torch.

Each op runs on random bfloat16 logits, several times in a row in one CUDA graph. The result is the
time per call on the device, launches within the graph included; the logits are in the L2 cache, as
after the product that computes them, where they fit.

- ``argmax_rows`` and ``top_candidates`` (4), beside ``argmax`` and ``softmax`` with ``topk``.
- ``target_probs`` without filters, beside ``softmax``.
- ``target_probs`` with filters, beside ``sort``, ``softmax`` and ``cumsum``, or ``topk`` where
  ``top_k`` is the only filter.
- ``target_samples``, beside ``cumsum`` and ``searchsorted`` with random numbers that exist.

    python tools/bench/sampling.py --out tools/bench/results/sampling.json
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import product
from statistics import median
from typing import NamedTuple

import torch
from report_file import add_out
from timing import show

from graphkit.cli.benchmarks import device_ms, synchronise
from graphkit.graphs import environment, resolve_device
from graphkit.ops.logits import argmax_rows, top_candidates
from graphkit.ops.sampling import philox_uniform, target_samples
from graphkit.ops.target_probs import target_probs
from graphkit.records import BenchReport, Measure

VOCABS, ROWS = (32_000, 128_256), (1, 4, 32, 128)
QUICK = ((500,), (1, 4))
CALLS, CANDIDATES = 10, 4
Acts = Mapping[str, Callable[[], torch.Tensor]]


class Filters(NamedTuple):
    """Filters of all rows; see ``graphkit.ops.target_probs``."""

    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __str__(self) -> str:
        used = (f"{name} {value}" for name, value in self._asdict().items())
        defaults = (f"{name} {value}" for name, value in Filters()._asdict().items())
        changed = [one for one, other in zip(used, defaults, strict=True) if one != other]
        return ", ".join(changed) or "no filters"


FILTERS = (
    Filters(), Filters(top_k=50), Filters(top_p=0.9), Filters(top_k=5000, top_p=0.9),
    Filters(top_k=50, top_p=0.9, min_p=0.05),
)  # fmt: skip


def ops(logits: torch.Tensor) -> Acts:
    """Return the calls of graphkit by name, as those of ``with_torch``."""
    rows = torch.arange(len(logits), device=logits.device)
    ones, tokens = torch.ones(len(logits), device=logits.device), torch.empty_like(rows)

    def argmax() -> torch.Tensor:
        argmax_rows(tokens, logits)
        return tokens

    def probs(top_k: int, top_p: float, min_p: float) -> Callable[[], torch.Tensor]:
        settings = (ones * 0.8, ones.int() * top_k, ones * top_p, ones * min_p)
        return lambda: target_probs(logits, rows, *settings, 1)

    softmax = logits.float().softmax(-1)
    return {
        "argmax_rows": argmax,
        "top_candidates": lambda: top_candidates(logits, CANDIDATES)[1],
        **{f"target_probs, {each}": probs(*each) for each in FILTERS},
        "target_samples": lambda: target_samples(softmax, rows, rows, rows[:, None]),
    }


def with_torch(logits: torch.Tensor) -> Acts:
    """Return the calls of torch with the same results."""
    rows, softmax = torch.arange(len(logits), device=logits.device), logits.float().softmax(-1)
    samples = philox_uniform(rows, rows.int(), 1)

    def drawn() -> torch.Tensor:
        running = softmax.cumsum(-1)
        return torch.searchsorted(running, samples * running[:, -1:], right=True)[:, 0]

    return {
        "argmax_rows": lambda: logits.argmax(-1),
        "top_candidates": lambda: logits.float().softmax(-1).topk(CANDIDATES).indices,
        **{
            f"target_probs, {each}": lambda each=each: probs_with_torch(logits, each)
            for each in FILTERS
        },
        "target_samples": drawn,
    }


def probs_with_torch(logits: torch.Tensor, filters: Filters) -> torch.Tensor:
    """Return the distribution of each row at temperature 0.8."""
    top_k, top_p, min_p = filters
    scores = logits.float() / 0.8
    if filters == Filters():
        return scores.softmax(-1)
    if top_k and top_p == 1 and min_p == 0:
        least = scores.topk(top_k).values[:, -1:]
        return scores.masked_fill(scores < least, -torch.inf).softmax(-1)
    falling, order = scores.sort(-1, descending=True)
    if top_k:
        falling[:, top_k:] = -torch.inf
    share = falling.softmax(-1)
    is_kept = (share.cumsum(-1) - share < top_p) & (share >= min_p * share[:, :1])
    share = falling.masked_fill(~is_kept, -torch.inf).softmax(-1)
    return torch.empty_like(share).scatter_(1, order, share)


class Repeated:
    """Calls in a row: in one graph on a GPU, which is captured at once, and directly on a CPU."""

    def __init__(self, act: Callable[[], torch.Tensor], device: torch.device) -> None:
        self._device = device
        self._run: Callable[[], object] = act
        self._calls = 1
        if device.type == "cuda":
            act()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for _ in range(CALLS):
                    act()
            self._run, self._calls = graph.replay, CALLS

    def us(self) -> float:
        """Return the microseconds per call of one run, after one that is not measured."""
        self._run()
        synchronise(self._device)
        with device_ms(self._device) as ms:
            self._run()
        return ms[0] / self._calls * 1e3


def measures(
    vocabs: tuple[int, ...], rows: tuple[int, ...], device: torch.device, rounds: int
) -> Iterator[Measure]:
    """Measure all calls at each vocabulary and number of rows; implementations take turns."""
    for vocab, count in product(vocabs, rows):
        setting = f"{vocab:,} tokens, {count} rows"
        logits = (torch.randn(count, vocab, device=device) * 3).bfloat16()
        theirs = with_torch(logits)
        for name, act in ops(logits).items():
            pair = {"graphkit": Repeated(act, device), "torch": Repeated(theirs[name], device)}
            times: dict[str, list[float]] = {who: [] for who in pair}
            for _ in range(rounds):
                for who, repeated in pair.items():
                    times[who].append(repeated.us())
            ours, others = (median(each) for each in times.values())
            for what, value, unit in (
                ("graphkit", ours, "us"), ("torch", others, "us"),
                ("torch over graphkit", others / ours, "x"),
            ):  # fmt: skip
                yield Measure(name=what, value=value, unit=unit, setting=setting, variant=name)


def main(argv: list[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_out(parser)
    parser.add_argument("--rounds", type=int, default=7, help="rounds of each measurement (7)")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda (auto)")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to try the script")
    options = parser.parse_args(argv)
    device, began = resolve_device(options.device), time.perf_counter()
    torch.manual_seed(0)
    with torch.no_grad():
        sizes = QUICK if options.quick else (VOCABS, ROWS)
        found = tuple(measures(*sizes, device, options.rounds))
    report = BenchReport(
        name="ops over the vocabulary",
        environment=environment(device),
        settings={
            "dtype": "bfloat16", "temperature": "0.8", "calls per graph": CALLS,
            "rounds": options.rounds, "seconds": round(time.perf_counter() - began),
        },
        measures=found,
    )  # fmt: skip
    show(report, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
