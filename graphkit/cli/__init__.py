"""The ``graphkit`` command. Results go to stdout, everything else to stderr.

Exit codes: 0 done, 1 failed, 2 usage, 3 no usable device, 130 interrupted, 143 terminated.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import cache

import graphkit
from graphkit.cli.exits import (
    INTERRUPTED,
    TERMINATED,
    Terminated,
    describe,
    exit_code,
    signals_as_exceptions,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command, by default that of the process, and return its exit code.

    Raises:
        SystemExit: With code 2 for arguments that cannot be parsed, with 0 after ``--help``.
    """
    try:
        with signals_as_exceptions():
            return _run(argv)
    except Terminated:
        _print_error("terminated", starts_line=True)
        return TERMINATED
    except KeyboardInterrupt:
        _print_error("interrupted", starts_line=True)
        return INTERRUPTED


@cache
def build_parser() -> argparse.ArgumentParser:
    """Build the parser of all commands once; parsed arguments hold the command as ``run``."""
    from graphkit.cli import audit, bench, capture, diff, doctor, export, generate, inspect, record
    from graphkit.cli.options import HelpFormatter

    parser = argparse.ArgumentParser(
        prog="graphkit",
        description="Capture, inspect and audit CUDA graphs for every forward mode of speculative "
        "decoding.",
        epilog="""
Exit codes:
  0    done
  1    failed
  2    usage: arguments or files that cannot be used
  3    no usable device
  130  interrupted (Ctrl-C)
  143  terminated (SIGTERM)

graphkit COMMAND --help describes a command and its options, with examples.
""",
        formatter_class=HelpFormatter,
    )
    parser.add_argument(
        "--version", action="version", version=f"graphkit {graphkit.__version__}",
        help="print the version and exit",
    )  # fmt: skip
    parser.add_argument(
        "-v", "--verbose", action="count", default=0,
        help="print the log of graphkit, such as each capture, and the traceback of an error; -vv "
        "also prints details for debugging",
    )  # fmt: skip
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in (
        capture, inspect, audit, diff, export, record, generate, bench, doctor,
    ):  # fmt: skip
        command.add_to(commands)
    for subparser in commands.choices.values():
        subparser.formatter_class = HelpFormatter
    return parser


def _run(argv: Sequence[str] | None) -> int:
    from graphkit.cli.output import log_to_stderr

    arguments = build_parser().parse_args(argv)
    try:
        with log_to_stderr(arguments.verbose):
            return int(arguments.run(arguments))
    except Exception as error:  # code of a TARGET may raise anything
        if arguments.verbose:
            raise
        _print_error(describe(error))
        return exit_code(error)


def _print_error(text: str, *, starts_line: bool = False) -> None:
    """Print one line to stderr, on a terminal after the ^C that it echoes."""
    from graphkit.cli.output import print_message

    print_message(f"error: {text}", starts_line=starts_line)
