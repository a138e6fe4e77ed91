"""``graphkit export``: a saved record in another form."""

from __future__ import annotations

import argparse
from pathlib import Path

from graphkit.cli.exits import DONE, UsageError
from graphkit.cli.files import check_writable, write_whole
from graphkit.cli.screen import note
from graphkit.records import CaptureRecord


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command's words."""
    parser = commands.add_parser(
        "export",
        help="write a saved record as json or svg",
        description="Write a saved record in the form that the suffix of --out names.",
    )
    parser.add_argument("record", type=Path, metavar="RECORD", help="a file from capture --out")
    parser.add_argument("--out", type=Path, metavar="F.{json,svg}", required=True)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Do it; returns the exit code."""
    check_writable(arguments.out)
    record = CaptureRecord.load(arguments.record)
    write_whole(arguments.out, _text(record, arguments.out.suffix))
    note(f"wrote {arguments.out}")
    return DONE


def _text(record: CaptureRecord, suffix: str) -> str:
    from graphkit.views import capture_view, svg_of

    if suffix == ".json":
        return record.to_json()
    if suffix == ".svg":
        return svg_of(capture_view(record), title=f"graphkit capture: {record.target}")
    raise UsageError(f"cannot export to {suffix or 'no suffix'!r}: formats are .json and .svg.")
