"""How soon all ranks end when one of them fails, and what each prints.

Each case runs on its own processes, with gloo and the recorder. Times count from the fault. The bar
is the time limit of the group and half a second. ``settings`` has the error of each rank.

    python tools/bench/rank_failures.py --out tools/bench/results/rank_failures.json
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from rank_failure_cases import CASES, LATE_S, LIMIT_S, run_case
from report_file import add_out, write_report
from rich.console import Console
from rich.table import Table

from graphkit.graphs import environment
from graphkit.records import BenchReport, Measure

_ROOT = f"{Path(__file__).parents[2]}/"
_BAR_S = LIMIT_S + 0.5


def main() -> int:
    """Run the cases, print a table, and write a record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="part of the names of the cases to run")
    parser.add_argument("--processes", default="2,3", help="numbers of processes; default: 2,3")
    add_out(parser)
    arguments = parser.parse_args()
    table = Table("phase", "fault", "ranks", "others ended, s", "its own end, s", "text of rank")
    settings: dict[str, int | str] = {"time limit, s": str(LIMIT_S), "late by, s": str(LATE_S)}
    measures, failed = [], 0
    for case in (each for each in CASES if arguments.only in each.name):
        for size in map(int, arguments.processes.split(",")):
            endings = run_case(case, size)
            others = [each for rank, each in enumerate(endings) if rank != case.failing_rank]
            last = max(each.seconds for each in others)
            failed += last > _BAR_S or bool(case.problems(endings))
            lines = [f"{rank}: {each.text}".replace(_ROOT, "") for rank, each in enumerate(endings)]
            own = f"{endings[case.failing_rank].seconds:.2f}"
            table.add_row(case.phase, case.fault, str(size), f"{last:.2f}", own, "\n".join(lines))
            settings[f"{case.name}, {size} ranks"] = " | ".join(lines)
            measures.append(
                Measure(
                    name="last of the other ranks", value=last, unit="s", bar=_BAR_S,
                    setting=case.name, variant=f"{size} ranks",
                )
            )  # fmt: skip
    Console(width=200).print(table)
    if arguments.out is not None:
        report = BenchReport(
            name="failures of ranks", environment=environment(torch.device("cpu")),
            settings=settings, measures=tuple(measures),
        )  # fmt: skip
        write_report(report, arguments.out)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
