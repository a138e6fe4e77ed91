"""The ``graphkit`` command. Results go to stdout, everything else to stderr.

Exit codes: 0 done, 1 failed, 2 usage, 3 no usable device, 130 interrupted, 143 terminated.
"""

from __future__ import annotations

from collections.abc import Sequence

from graphkit.cli.exit_codes import INTERRUPTED, TERMINATED, describe, exit_code_of
from graphkit.cli.interrupts import Terminated, signals_as_exceptions


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: Arguments after ``graphkit``; ``None`` selects those of the process.

    Returns:
        The exit code.

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


def _run(argv: Sequence[str] | None) -> int:
    from graphkit.cli.parser import build_parser

    arguments = build_parser().parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except Exception as error:  # code of a TARGET may raise anything
        if arguments.verbose:
            raise
        _print_error(describe(error))
        return exit_code_of(error)


def _print_error(text: str, *, starts_line: bool = False) -> None:
    """Print one line to stderr, on a terminal after the ^C that it echoes."""
    from graphkit.cli.output import print_message

    print_message(f"error: {text}", starts_line=starts_line)
