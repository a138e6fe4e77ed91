"""``graphkit capture``: capture every mode and size of a target and check every replay."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from graphkit.cli.exits import DONE, FAILED
from graphkit.cli.options import add_target_options
from graphkit.cli.output import check_writable, print_result, write_output
from graphkit.cli.ranks import add_tp_option, check_same_order, rank_path
from graphkit.cli.targets import announce, capture_selected, select_target

if TYPE_CHECKING:
    from graphkit.distributed import RankGroup


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "capture",
        help="capture the graphs of a target and check every replay",
        description="Capture every mode and size of a target, replay every batch size that each "
        "graph holds, and compare the replays with the same step run without a graph. Where "
        "neither the command nor TARGET names sizes, and there are more than 8 requests, the sizes "
        "are powers of two, and each batch size is replayed at the smallest that holds it. If "
        "TARGET has an engine, its whole step is the mode STEP, and its loops are compared, too. "
        "If it declares its model, the forwards are compared with that model. "
        "With --tp, the graphs of all ranks must have the same nodes in the same order.",
        epilog="""
Exit code 1: a replay is wrong, a forward cannot be captured or differs from its model, or the
graphs of two ranks differ.

Examples:
  graphkit capture
  torchrun --nproc-per-node 2 -m graphkit capture --tp 2
  graphkit capture engine.targets:llama --mode target_verify --batch-sizes 1,8
  graphkit capture engine.targets:llama --estimate
""",
    )
    add_target_options(parser)
    add_tp_option(parser, _run)
    parser.add_argument(
        "--out", type=Path, metavar="F",
        help="write the record as JSON to file F; with --tp, one file per rank: F.json of rank 0, "
        "F.rank1.json of rank 1",
    )  # fmt: skip
    parser.add_argument(
        "--estimate", action="store_true",
        help="print the memory that the graphs and their buffers would take, predicted from three "
        "sizes of each mode, and keep no graph; replays are not checked",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print the record instead of a table")


def _run(arguments: argparse.Namespace, group: RankGroup | None) -> int:
    from graphkit.views import capture_view, memory_view

    out = None if arguments.out is None else rank_path(arguments.out, group)
    if out is not None:
        check_writable(out)
    selection = select_target(arguments, group)
    if arguments.estimate:
        from graphkit.audit.runs.capture import estimate_target

        announce("estimating", selection, selection.batch_sizes)
        estimate = estimate_target(selection.target, **selection.settings)
        print_result(estimate.to_json() if arguments.json else memory_view(estimate))
        if out is not None:
            write_output(out, estimate.to_json())
        return DONE
    inspect = out is not None or arguments.json or group is not None
    record = capture_selected(selection, inspect=inspect)
    print_result(record.to_json() if arguments.json else capture_view(record))
    if out is not None:
        write_output(out, record.to_json())
    if group is not None:
        check_same_order(record, group)
    return FAILED if record.mismatches or record.differs_from_model else DONE
