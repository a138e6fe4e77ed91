"""``graphkit diff``: compare two saved records."""

from __future__ import annotations

import argparse
from pathlib import Path

from graphkit.cli.exit_codes import DONE
from graphkit.cli.help_format import HelpFormatter
from graphkit.cli.output import print_result
from graphkit.diff import diff_records
from graphkit.records import load_record


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "diff",
        help="compare two saved records",
        description="Compare two saved records: their environments, their measurements, and the "
        "nodes of each graph that both contain.",
        epilog="""
Exit code 0: the records were compared, whether they differ or not.

Example:
  graphkit diff before.json after.json
""",
        formatter_class=HelpFormatter,
    )
    parser.add_argument(
        "before", type=Path, metavar="A", help="a record of captures, of a program or of a graph"
    )
    parser.add_argument("after", type=Path, metavar="B", help="the record to compare with A")
    parser.add_argument("--json", action="store_true", help="print the DiffRecord as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    from graphkit.views import diff_view

    record = diff_records(load_record(arguments.before), load_record(arguments.after))
    print_result(record.to_json() if arguments.json else diff_view(record))
    return DONE
