"""The parser of the command line, with one subcommand per module."""

from __future__ import annotations

import argparse
from functools import cache

import graphkit
from graphkit.cli import (
    audit,
    bench,
    capture,
    diff,
    doctor,
    export,
    generate,
    inspect,
    plan,
    record,
)
from graphkit.cli.help_format import HelpFormatter

COMMANDS = (capture, inspect, audit, diff, export, record, generate, bench, plan, doctor)


@cache
def build_parser() -> argparse.ArgumentParser:
    """Build the parser of all commands once; parsed arguments hold the command as ``run``."""
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
        "-v", "--verbose", action="store_true", help="print the traceback of an error"
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_to(commands)
    return parser
