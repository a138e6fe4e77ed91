"""``graphkit diff``: what changed between two saved records."""

from __future__ import annotations

import argparse
from pathlib import Path

from graphkit.cli.exits import DONE
from graphkit.cli.screen import show
from graphkit.diff import diff_records
from graphkit.records import load_record


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command's words."""
    parser = commands.add_parser(
        "diff",
        help="say what changed between two saved records",
        description="Say what changed between two saved records: environment, figures, and the "
        "nodes of each graph that both have. Exits with 0 whether anything changed or not.",
    )
    parser.add_argument("before", type=Path, metavar="A", help="a capture, recording or graph")
    parser.add_argument("after", type=Path, metavar="B", help="what to compare it with")
    parser.add_argument("--json", action="store_true", help="print the DiffRecord")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Do it; returns the exit code."""
    from graphkit.views import diff_view

    record = diff_records(load_record(arguments.before), load_record(arguments.after))
    show(record.to_json() if arguments.json else diff_view(record))
    return DONE
