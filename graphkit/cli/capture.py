"""``graphkit capture``: capture every mode and size of a target, and check every replay."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from graphkit.cli.exits import DONE, FAILED
from graphkit.cli.files import check_writable, write_whole
from graphkit.cli.screen import note, progress_on_stderr, show
from graphkit.cli.threads import use_one_thread
from graphkit.errors import ConfigError

if TYPE_CHECKING:
    from graphkit.spec import ForwardMode

REFERENCE = "graphkit.reference:reference_target"


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command's words."""
    parser = commands.add_parser(
        "capture",
        help="capture a target's graphs and check every replay",
        description="Capture every mode and size of a target. For each size, replay live batches "
        "of every smaller size and compare them with the forward run without a graph.",
    )
    parser.add_argument(
        "target", nargs="?", default=REFERENCE, metavar="TARGET",
        help="package.module:attribute, a CaptureTarget or a factory; default: the reference model",
    )  # fmt: skip
    parser.add_argument(
        "--mode", action="append", metavar="M", help="a forward mode; may be given again"
    )
    parser.add_argument("--batch-sizes", type=_sizes, metavar="1,2,4", help="sizes to capture")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--out", type=Path, metavar="F", help="write the CaptureRecord as JSON")
    parser.add_argument("--json", action="store_true", help="print the record instead of a table")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Do it; returns the exit code."""
    from graphkit.graphs import resolve_device
    from graphkit.targets import capture_target, locate
    from graphkit.views import capture_view

    if arguments.out is not None:
        check_writable(arguments.out)
    device = str(resolve_device(arguments.device))
    if device == "cpu" and arguments.target == REFERENCE:
        use_one_thread()
    target = locate(arguments.target, device)
    with progress_on_stderr() as progress:
        record = capture_target(
            target,
            modes=_modes(arguments.mode),
            batch_sizes=arguments.batch_sizes,
            device=device,
            inspect=arguments.out is not None or arguments.json,
            progress=progress,
        )
    show(record.to_json() if arguments.json else capture_view(record))
    if arguments.out is not None:
        write_whole(arguments.out, record.to_json())
        note(f"wrote {arguments.out}")
    return FAILED if record.mismatches else DONE


def _sizes(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of sizes such as 1,2,4") from None


def _modes(names: list[str] | None) -> list[ForwardMode] | None:
    from graphkit.spec import ForwardMode

    if names is None:
        return None
    known = ", ".join(ForwardMode.__members__)
    for name in names:
        if name.upper() not in ForwardMode.__members__:
            raise ConfigError(f"unknown mode {name!r}; modes are {known}.", field="mode")
    return [ForwardMode[name.upper()] for name in names]
