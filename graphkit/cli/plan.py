"""``graphkit plan``: choose the batch sizes to capture from a log of live sizes."""

from __future__ import annotations

import argparse
import math
import re
from pathlib import Path

from graphkit.cli.exits import DONE
from graphkit.cli.options import HelpFormatter, parse_count
from graphkit.cli.output import check_writable, print_result, write_output

_BYTES = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "plan",
        help="choose the batch sizes to capture from a log of live sizes",
        description="Choose the batch sizes to capture that take the least GPU time in a traffic, "
        "within a budget, and compare them with the default list. Without a record, the list with "
        "the least padding is chosen.",
        epilog="""
The log is CSV with a column batch_size, JSON lines with a number or a batch_size each, or the
live_sizes of a runner's stats as JSON, also in a record. A column or key count says how many steps
a line is.

Times of sizes that the record does not have are interpolated. Batches that are faster without a
graph than padded get none.

Runners and commands take the file of --out as their batch sizes:
  gk.TargetVerifyRunner(..., batch_sizes="plan.json")
  graphkit capture engine.targets:llama --batch-sizes plan.json

Examples:
  graphkit plan --traffic steps.csv
  graphkit plan --traffic steps.jsonl --record capture.json --mode TARGET_VERIFY --max-sizes 16
  graphkit plan --traffic steps.csv --record capture.json --max-memory 500M --out plan.json
""",
        formatter_class=HelpFormatter,
    )
    parser.add_argument(
        "--traffic", type=Path, required=True, metavar="F", help="log of live batch sizes"
    )
    parser.add_argument(
        "--record", type=Path, metavar="R",
        help="record of graphkit capture, with the times, memory and capture times of sizes",
    )  # fmt: skip
    parser.add_argument(
        "--mode", default="", type=str.upper, metavar="M",
        help="forward mode of the record; default: the only one",
    )  # fmt: skip
    budget = parser.add_mutually_exclusive_group()
    budget.add_argument(
        "--max-sizes", type=parse_count, metavar="N",
        help="most sizes; default: as many as the default list has",
    )  # fmt: skip
    budget.add_argument(
        "--max-memory", type=_bytes, metavar="500M",
        help="most memory of the graphs, in bytes, or with K, M or G",
    )  # fmt: skip
    budget.add_argument(
        "--max-capture-seconds", type=_seconds, metavar="S", help="most time of the capture"
    )
    parser.add_argument("--out", type=Path, metavar="F", help="write the plan as JSON to file F")
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    from graphkit.plan import plan_sizes, read_traffic
    from graphkit.records import CaptureRecord
    from graphkit.views import plan_view

    if arguments.out is not None:
        check_writable(arguments.out)
    record = None if arguments.record is None else CaptureRecord.load(arguments.record)
    plan = plan_sizes(
        read_traffic(arguments.traffic, arguments.mode),
        record,
        mode=arguments.mode,
        max_sizes=arguments.max_sizes,
        max_memory_bytes=arguments.max_memory,
        max_capture_s=arguments.max_capture_seconds,
    )
    print_result(plan.to_json() if arguments.json else plan_view(plan))
    if arguments.out is not None:
        write_output(arguments.out, plan.to_json())
    return DONE


def _bytes(text: str) -> float:
    found = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,6})?)([kmg]?)(?:i?b)?", text.lower())
    if found and float(found[1]) > 0:
        return float(found[1]) * _BYTES[found[2]]
    raise argparse.ArgumentTypeError(f"{text!r} is not an amount of memory, such as 500M or 1.5G")


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if 0 < seconds < math.inf:
        return seconds
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
