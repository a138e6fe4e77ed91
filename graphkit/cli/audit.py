"""``graphkit audit``: search the graphs of a target for silent replay bugs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from graphkit.cli.exits import DONE, FAILED, NO_DEVICE
from graphkit.cli.options import add_target_options, refuse_options
from graphkit.cli.output import (
    check_writable,
    print_message,
    print_result,
    progress_on_stderr,
    write_output,
)
from graphkit.cli.ranks import add_tp_option, merge_rank_reports, rank_path
from graphkit.cli.targets import TargetSelection, announce, select_target
from graphkit.records import AuditReport, GraphBaseline, count_of

if TYPE_CHECKING:
    from graphkit.distributed import RankGroup


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "audit",
        help="search the graphs of a target for silent replay bugs",
        description="Search the graphs of a target for frozen values, undeclared memory, leaking "
        "pad rows and other causes of wrong replays, mode by mode. With --tp, all ranks audit "
        "together, and rank 0 prints what any of them found.",
        epilog="""
Exit code 1: a finding is an error, or a forward cannot be captured. Exit code 3: no check could be
made, for example because every mode runs without graphs. Other findings do not change the exit
code.

Examples:
  graphkit audit engine.targets:llama
  torchrun --nproc-per-node 2 -m graphkit audit engine.targets:llama --tp 2
  graphkit audit engine.targets:llama --only frozen,pads --mode target_verify
  graphkit audit engine.targets:llama --only rows
  graphkit audit engine.targets:llama --lock graphs.lock.json
  graphkit audit engine.targets:llama --check graphs.lock.json
""",
    )
    add_target_options(parser, default_sizes="its smallest size, a middle one and the largest")
    add_tp_option(parser, _run)
    parser.add_argument(
        "--only", type=_parse_names, metavar="frozen,pads",
        help="audits to run, of warmup, frozen, forward, pointers, pool-poison, finite, pads, "
        "shadow, launch, loop, misses, wrapper, rows; default: all but rows, none with --check",
    )  # fmt: skip
    parser.add_argument(
        "--tolerance", type=float, default=1.0, metavar="X",
        help="multiple of the usual rounding of the dtype that is not an error; default: 1",
    )  # fmt: skip
    lock = parser.add_mutually_exclusive_group()
    lock.add_argument(
        "--lock", type=Path, metavar="F",
        help="write the nodes of every graph to lock file F instead of an audit; with --tp, one "
        "file per rank, as capture does",
    )  # fmt: skip
    lock.add_argument(
        "--check", type=Path, metavar="F",
        help="compare the graphs with lock file F; a changed graph is an error",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, metavar="F", help="write the report as JSON to file F")
    parser.add_argument("--json", action="store_true", help="print the report as JSON, not as text")


def _run(arguments: argparse.Namespace, group: RankGroup | None) -> int:
    from graphkit.views import audit_view

    if arguments.lock is not None:
        why = "has no effect: --lock writes a lock file and runs no audit. Drop one of them."
        refuse_options(arguments, ("only", "out", "json"), why)
        path = rank_path(arguments.lock, group)
        check_writable(path)
        return _write_lock(path, select_target(arguments, group))
    out = None if group is not None and group.rank else arguments.out
    if out is not None:
        check_writable(out)
    path = arguments.check
    lock = None if path is None else GraphBaseline.load(rank_path(path, group))
    selection = select_target(arguments, group)
    report = _audit(selection, lock, arguments)
    if group is not None:
        report = merge_rank_reports(report, group)
    print_result(report.to_json() if arguments.json else audit_view(report))
    if out is not None:
        write_output(out, report.to_json())
    if not report.has_checked:
        print_message("error: nothing audited: no check could be made")
        return NO_DEVICE
    return FAILED if any(finding.severity == "error" for finding in report.findings) else DONE


def _audit(
    selection: TargetSelection, lock: GraphBaseline | None, arguments: argparse.Namespace
) -> AuditReport:
    from graphkit.audit import audit_target

    only = arguments.only
    if only is None and lock is not None:
        only = []  # check the lock alone
    announce("auditing", selection, _audited_sizes(selection))
    with progress_on_stderr() as progress:
        return audit_target(
            selection.target,
            only=only,
            tolerance=arguments.tolerance,
            lock=lock,
            progress=progress,
            **selection.settings,
        )


def _write_lock(path: Path, selection: TargetSelection) -> int:
    from graphkit.audit import graph_baseline

    announce("capturing", selection, _audited_sizes(selection))
    lock = graph_baseline(selection.target, **selection.settings)
    write_output(path, lock.to_json(), f"locked {count_of(len(lock.graphs), 'graph')}")
    return DONE


def _audited_sizes(selection: TargetSelection) -> list[int]:
    from graphkit.audit.report import representative_sizes

    return selection.batch_sizes or representative_sizes(selection.target)


def _parse_names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise argparse.ArgumentTypeError(f"{text!r} names no audit, such as frozen,pads")
    return names
