"""Device loops under random joins, ends, aborts, stops, slow readers and full rings.

Requests run in rows of ``SpecStepRunner``, whose text is known (``table_model.py``). Each turn
admits and aborts some, and launches a loop over some of those that run, with random limits and
watched rows. Streams are read at once, slowly, much later, in another order, or up to an exception
or a stop. Every report is compared with the requests that were running, and every request's
tokens with its text. A watchdog ends the process if 100 turns take two minutes.

    python tools/bench/loops.py --out tools/bench/results/loops.json
"""

from __future__ import annotations

import argparse
import faulthandler
import sys
import time
from collections import Counter
from collections.abc import Iterator

import torch
from random_reader import RandomReader
from report_file import add_out
from table_model import Table, table_runner
from timing import show

from graphkit.graphs import environment, resolve_device
from graphkit.records import BenchReport, Measure

ROWS, BATCH_SIZES, RING_ENTRIES = 12, (1, 2, 4, 8), 8
HANG_S = 120.0
NOTE_EVERY = 100
NAMED = 20
"""Most faults that a report names."""


def measures(device: torch.device, loops: int, seed: int) -> Iterator[Measure]:
    """Run half of the loops over chains and half over trees; yield counts and times."""
    table, counts, faults, seconds = Table(device), Counter[str](), list[str](), 0.0
    for topk, share in ((1, loops - loops // 2), (2, loops // 2)):
        with table_runner(
            table, topk, rows=ROWS, batch_sizes=BATCH_SIZES, ring_entries=RING_ENTRIES
        ) as runner:
            runner.capture()
            reader = RandomReader(runner, table, ROWS, RING_ENTRIES, seed + topk)
            began = time.perf_counter()
            for turn in range(share):
                if turn % NOTE_EVERY == 0:
                    note(f"{turn:,} loops, topk {topk}")
                reader.turn()
            reader.finish()
            seconds += time.perf_counter() - began
            counts += reader.counts
            faults += reader.faults
    yield Measure(name="faults", value=len(faults), unit="", bar=0)
    for fault in faults[:NAMED]:
        yield Measure(name=fault, value=1, unit="", bar=0)
    for name, count in sorted(counts.items()):
        yield Measure(name=name, value=count, unit="")
    yield Measure(name="time", value=seconds, unit="s")
    yield Measure(name="time per loop", value=seconds / counts["loops"] * 1e3, unit="ms")


def note(text: str) -> None:
    """Print progress with the time of day, and restart the watchdog."""
    faulthandler.dump_traceback_later(HANG_S, exit=True, file=sys.__stderr__)
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr)


def main(argv: list[str] | None = None) -> int:
    """Run the command. The exit code is 1 if a token was lost, repeated or wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_out(parser)
    parser.add_argument("--loops", type=int, default=10_000, help="launches (10,000)")
    parser.add_argument("--seed", type=int, default=0, help="seed of all choices (0)")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda (auto)")
    options = parser.parse_args(argv)
    device, settings = (
        resolve_device(options.device),
        {"loops": options.loops, "seed": options.seed},
    )
    try:
        with torch.no_grad():
            report = BenchReport(
                name="device loops: each token compared with the known text",
                environment=environment(device),
                settings=settings,
                measures=tuple(measures(device, **settings)),
            )
    finally:
        faulthandler.cancel_dump_traceback_later()
    return int(show(report, options.out))


if __name__ == "__main__":
    sys.exit(main())
