"""``graphkit export``: convert a saved record."""

from __future__ import annotations

import argparse
from pathlib import Path

from graphkit.cli.exits import DONE, UsageError
from graphkit.cli.output import check_writable, write_output
from graphkit.records import load_record


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "export",
        help="convert a saved record to json, html, svg or a trace",
        description="Convert a saved record to the format that the suffix of --out names.",
        epilog="""
Formats:
  .json        the record
  .html        a page that loads nothing from elsewhere
  .svg         a picture of the record's tables; with --mode, of the graphs
  .trace.json  a timeline for Perfetto

A picture of a graph with 500 nodes or more shows the modules that the screen opens with.

Exit code 2: the record cannot be read, or lacks the nodes that the format shows.

Examples:
  graphkit export record.json --out record.html
  graphkit export record.json --mode decode --batch-size 8 --out decode.svg
""",
    )
    parser.add_argument("record", type=Path, metavar="RECORD", help="the file of a saved record")
    parser.add_argument(
        "--out", type=Path, metavar="F", required=True,
        help="file to write, with the suffix of a format",
    )  # fmt: skip
    parser.add_argument(
        "--mode", metavar="M",
        help="export only graphs of this forward mode or of this name; default: all",
    )  # fmt: skip
    parser.add_argument(
        "--batch-size", type=int, metavar="N",
        help="export only graphs of N requests; default: all",
    )  # fmt: skip
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    from graphkit.views import FORMATS, Export

    check_writable(arguments.out)
    suffix = _suffix(arguments.out, list(FORMATS))
    record = load_record(arguments.record)
    export = Export(record, mode=arguments.mode, batch_size=arguments.batch_size)
    write_output(arguments.out, FORMATS[suffix](export))
    return DONE


def _suffix(path: Path, known: list[str]) -> str:
    """Return the longest known suffix of a path; a file called trace.json is a trace too."""
    name = path.name if path.stem != "trace" else f".{path.name}"
    suffixes = [suffix for suffix in known if name.endswith(suffix)]
    if not suffixes:
        raise UsageError(
            f"cannot export to {path}: formats are {', '.join(known)}. End the name in --out with "
            "one of these suffixes."
        )
    return max(suffixes, key=len)
