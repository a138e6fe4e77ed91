"""``graphkit export``: a saved record in another form."""

from __future__ import annotations

import argparse
from pathlib import Path

from graphkit.cli.exits import DONE, UsageError
from graphkit.cli.files import check_writable, write_whole
from graphkit.cli.screen import note
from graphkit.records import load_record


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command's words."""
    parser = commands.add_parser(
        "export",
        help="write a saved record as json, html, svg, dot or a trace",
        description="Write a saved record in the form that the suffix of --out names: .json, "
        ".html (a page that loads nothing), .svg, .dot (one graph) or .trace.json (for Perfetto).",
    )
    parser.add_argument("record", type=Path, metavar="RECORD", help="a saved record")
    parser.add_argument(
        "--out", type=Path, metavar="F.{json,html,svg,dot,trace.json}", required=True
    )
    parser.add_argument("--mode", metavar="M", help="only graphs of this forward mode or name")
    parser.add_argument("--batch-size", type=int, metavar="N", help="only graphs of this size")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Do it; returns the exit code."""
    from graphkit.views import FORMATS, Export

    check_writable(arguments.out)
    suffix = _suffix(arguments.out, list(FORMATS))
    record = load_record(arguments.record)
    export = Export(record, mode=arguments.mode, batch_size=arguments.batch_size)
    write_whole(arguments.out, FORMATS[suffix](export))
    note(f"wrote {arguments.out}")
    return DONE


def _suffix(path: Path, known: list[str]) -> str:
    """The longest known suffix; ``trace.json`` is a trace as well."""
    name = path.name if path.stem != "trace" else f".{path.name}"
    found = [suffix for suffix in known if name.endswith(suffix)]
    if not found:
        raise UsageError(
            f"cannot export to {path.suffix or 'no suffix'!r}: formats are {', '.join(known)}. "
            "Name one of them in --out."
        )
    return max(found, key=len)
