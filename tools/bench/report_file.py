"""The option ``--out`` of benchmarks: checked before the work, replaced in one step after it."""

from __future__ import annotations

import argparse
from pathlib import Path

from graphkit.cli.exits import UsageError
from graphkit.cli.output import check_writable, write_output
from graphkit.records import BenchReport


def add_out(parser: argparse.ArgumentParser) -> None:
    """Declare ``--out``. A path that cannot be written is refused while options are parsed."""
    parser.add_argument("--out", type=_checked, help="write the report to this JSON file")


def write_report(report: BenchReport, out: Path | None) -> None:
    """Replace the file of ``--out``, if there is one, in one step."""
    if out is not None:
        write_output(out, report.to_json())


def _checked(name: str) -> Path:
    try:
        check_writable(Path(name))
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return Path(name)
