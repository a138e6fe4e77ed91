"""``graphkit diff``: compare two saved records."""

from __future__ import annotations

import argparse
import math
from collections.abc import Collection
from pathlib import Path

from graphkit.cli.exits import DONE, FAILED, UsageError
from graphkit.cli.output import print_message, print_result
from graphkit.records import load_record, require_graphs
from graphkit.views.diff import (
    COSTS,
    TIMES,
    diff_records,
    have_common_figures,
    regressions,
    with_changes_above,
)


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "diff",
        help="compare two saved records",
        description="Compare two saved records: their environments, their measurements, and the "
        "nodes of each graph that both contain.",
        epilog="""
Exit code 0: the records were compared, whether they differ or not. With --fail-above, exit code 1
if a figure got worse by more: nodes, times of replays and kernels, and memory of graphs, but not
times of eager steps and captures, nor any time if a record is of the recorder, which runs on the
CPU. Exit code 2: a file is missing or is no record with graphs, or no size and no graph is in both
records of --fail-above.

Examples:
  graphkit diff before.json after.json --threshold 2%
  graphkit diff main.json branch.json --fail-above 5%
""",
    )
    parser.add_argument(
        "before", type=Path, metavar="A", help="a record of captures, of a program or of a graph"
    )
    parser.add_argument("after", type=Path, metavar="B", help="the record to compare with A")
    parser.add_argument(
        "--threshold", type=_percent, default=0.0, metavar="P",
        help="leave out figures that changed by at most P percent; default: 0",
    )  # fmt: skip
    parser.add_argument(
        "--fail-above", type=_percent, metavar="P",
        help="exit with code 1 if a figure got worse by more than P percent",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print the DiffRecord as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    from graphkit.views import diff_view
    from graphkit.views.formatting import plain

    before, after = (
        require_graphs(load_record(path)) for path in (arguments.before, arguments.after)
    )
    record = diff_records(before, after)
    shown = with_changes_above(record, arguments.threshold)
    print_result(shown.to_json() if arguments.json else diff_view(shown))
    if arguments.fail_above is None:
        return DONE
    if not have_common_figures(before, after):
        raise UsageError(
            f"--fail-above compared nothing: no size and no graph of {arguments.before} is in "
            f"{arguments.after}. Save both records with the same --mode and --batch-sizes."
        )
    costs: Collection[str] = COSTS
    if "recorder" in (before.backend, after.backend):
        costs = [name for name in COSTS if name not in TIMES]
        print_message("times not compared: the recorder runs on the CPU and measures no GPU time")
    worse = list(regressions(record, arguments.fail_above, costs))
    for line in worse:
        print_message(f"worse: {plain(line)}")
    return FAILED if worse else DONE


def _percent(text: str) -> float:
    """Parse ``5`` or ``5%`` to 0.05."""
    try:
        percent = float(text.removesuffix("%"))
    except ValueError:
        percent = math.nan
    if 0 <= percent < math.inf:
        return percent / 100
    raise argparse.ArgumentTypeError(f"{text!r} is not a percentage such as 5%")
