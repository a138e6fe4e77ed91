"""The ``graphkit`` command. Results go to stdout, everything else to stderr.

Exit codes: 0 done, 1 failed, 2 wrong usage, 3 no usable device.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import graphkit
from graphkit.cli import audit, capture, diff, doctor, export, generate, inspect, record
from graphkit.cli.exits import FAILED, exit_code_of
from graphkit.cli.screen import note
from graphkit.errors import GraphkitError

COMMANDS = (capture, inspect, audit, diff, export, record, generate, doctor)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: Words after ``graphkit``; ``None`` takes those of the process.

    Returns:
        The exit code. argparse itself exits with 2 on wrong words, and with 0 after ``--help``.
    """
    arguments = _parser().parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except Exception as error:  # a TARGET's own code may raise anything
        if arguments.verbose:
            raise
        note(f"error: {_told(error)}")
        return exit_code_of(error)
    except KeyboardInterrupt:
        note("error: interrupted")
        return FAILED


def _told(error: Exception) -> str:
    if isinstance(error, GraphkitError):
        return str(error)
    first_line = str(error).partition("\n")[0].rstrip(".")
    facts = f"{type(error).__name__}: {first_line}".rstrip(": ")
    return f"{facts}. graphkit -v shows where it came from."


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="graphkit",
        description="CUDA graphs for every forward mode of speculative decoding.",
        epilog="Exit codes: 0 done, 1 failed, 2 wrong usage, 3 no usable device.",
    )
    parser.add_argument("--version", action="version", version=f"graphkit {graphkit.__version__}")
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="show the traceback of an error"
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_to(commands)
    return parser
