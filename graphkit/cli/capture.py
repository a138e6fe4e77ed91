"""``graphkit capture``: capture every mode and size of a target, and check every replay."""

from __future__ import annotations

import argparse
from pathlib import Path

from graphkit.cli.capturing import REFERENCE, add_target_options, captured
from graphkit.cli.exits import DONE, FAILED
from graphkit.cli.files import check_writable, write_whole
from graphkit.cli.screen import note, show


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command's words."""
    parser = commands.add_parser(
        "capture",
        help="capture a target's graphs and check every replay",
        description="Capture every mode and size of a target. At each size, replay live batches of "
        "every size that it holds and compare them with the forward run without a graph.",
    )
    parser.add_argument(
        "target", nargs="?", default=REFERENCE, metavar="TARGET",
        help="package.module:attribute, found from the working directory too: a CaptureTarget or a "
        "function that makes one, called with device= if it takes that; default: the reference "
        "model",
    )  # fmt: skip
    add_target_options(parser)
    parser.add_argument("--out", type=Path, metavar="F", help="write the CaptureRecord as JSON")
    parser.add_argument("--json", action="store_true", help="print the record instead of a table")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Do it; returns the exit code."""
    from graphkit.views import capture_view

    if arguments.out is not None:
        check_writable(arguments.out)
    is_kept = arguments.out is not None or arguments.json
    record = captured(arguments.target, arguments, inspect=is_kept)
    show(record.to_json() if arguments.json else capture_view(record))
    if arguments.out is not None:
        write_whole(arguments.out, record.to_json())
        note(f"wrote {arguments.out}")
    return FAILED if record.mismatches else DONE
