"""``graphkit inspect``: look into the graphs of a saved record, or of a target captured now."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from graphkit.cli.capturing import REFERENCE, add_target_options, captured
from graphkit.cli.exits import DONE, FAILED, UsageError
from graphkit.cli.screen import is_terminal, note, show
from graphkit.records import CaptureRecord, RecordWithGraphs, load_record, require_graphs


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command's words."""
    parser = commands.add_parser(
        "inspect",
        help="look into graphs: their nodes, what made them, what they cost",
        description="Show what is inside graphs: on a terminal as a screen to walk through, whose "
        "keys ? lists, in a pipe as text. A saved record needs no GPU and no model.",
    )
    parser.add_argument(
        "subject", nargs="?", default=REFERENCE, metavar="RECORD|TARGET",
        help="a file from --out of capture or record, or package.module:attribute as for capture; "
        "default: the reference model",
    )  # fmt: skip
    add_target_options(parser)
    parser.add_argument("--batch-size", type=int, metavar="N", help="show this size alone")
    parser.add_argument("--plain", action="store_true", help="print text on a terminal, too")
    parser.add_argument("--json", action="store_true", help="print the record instead of text")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Do it; returns the exit code."""
    path = Path(arguments.subject)
    if path.suffix == ".json" or (path.exists() and not path.is_dir()):
        return _show(_saved(path, arguments), arguments)
    record = captured(arguments.subject, arguments, inspect=True)
    return _show(record, arguments) or _verdict(record)


def _saved(path: Path, arguments: argparse.Namespace) -> RecordWithGraphs:
    if arguments.batch_sizes is not None:
        raise UsageError(
            f"{path} was captured already: --batch-sizes is for a TARGET. Leave it out."
        )
    if arguments.mode is not None and len(arguments.mode) > 1:
        raise UsageError(
            f"--mode came more than once: {path} is shown by one mode or whole. Give one."
        )
    return require_graphs(load_record(path))


def _show(record: RecordWithGraphs, arguments: argparse.Namespace) -> int:
    modes: list[str] = arguments.mode or []
    mode = modes[0] if len(modes) == 1 else None  # several say what to capture, not what to show
    if arguments.json:
        show(record.to_json())
    elif _is_screen() and not arguments.plain:
        return _show_screen(record, mode, arguments.batch_size)
    else:
        from graphkit.views.inspect import inspect_view

        show(inspect_view(record, mode=mode, batch_size=arguments.batch_size))
    return DONE


def _show_screen(record: RecordWithGraphs, mode: str | None, batch_size: int | None) -> int:
    from graphkit.tui import InspectApp

    app = InspectApp(record, mode=mode, batch_size=batch_size)
    app.run()
    return app.return_code or DONE


def _is_screen() -> bool:
    """Whether there is a terminal on both ends, and one that can do more than print lines."""
    both = is_terminal(sys.stdin) and is_terminal(sys.stdout)
    return both and os.environ.get("TERM") not in ("dumb", "unknown")


def _verdict(record: CaptureRecord) -> int:
    """A capture whose replays are wrong has failed, whatever its graphs look like."""
    if record.mismatches:
        note(f"{len(record.mismatches):,} rows were replayed wrong; graphkit capture shows them")
    return FAILED if record.mismatches else DONE
