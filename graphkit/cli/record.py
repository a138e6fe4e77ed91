"""``graphkit record``: run a Python program and record every CUDA graph that it captures."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from graphkit.cli.exits import UsageError
from graphkit.cli.options import HelpFormatter, exists
from graphkit.cli.output import check_writable, print_message, write_output
from graphkit.records import count_of

if TYPE_CHECKING:
    from graphkit.recording import RecordedProgram

_USAGE = "graphkit record [-h] [--out F] (SCRIPT | -m MODULE) [ARGS ...]"


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "record",
        help="run a Python program and record its CUDA graphs",
        usage=_USAGE,
        description="Run a Python program unchanged and write one record of every CUDA graph that "
        "torch captures in it and in its child processes.",
        epilog="""
--out may also be given among ARGS. Arguments after -- always belong to the program.

The exit code is the program's own; 128 plus the signal's number if a signal ended it.

Examples:
  graphkit record --out serve.json serve.py --port 8000
  graphkit record -m my_engine.serve --port 8000
  graphkit record train.py -- --out model.pt
""",
        formatter_class=HelpFormatter,
    )
    _add_out(parser)
    parser.add_argument(
        "-m", dest="module", nargs=argparse.REMAINDER,
        help="a module to run, as python -m runs it, and its arguments",
    )  # fmt: skip
    parser.add_argument(
        "script", nargs=argparse.REMAINDER, metavar="SCRIPT",
        help="the file of the program, and its arguments",
    )  # fmt: skip
    parser.set_defaults(run=run)


def _add_out(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out", type=Path, metavar="F",
        help="write the record as JSON to file F; default: graphkit-record.json",
    )  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return the program's exit code."""
    from graphkit.recording import record_program

    is_module = arguments.module is not None
    program, out = _split([*(arguments.module or ()), *arguments.script])
    out = out or arguments.out or Path("graphkit-record.json")
    _check_program(program, is_module=is_module)
    check_writable(out)
    recorded = record_program(["-m", *program] if is_module else program)
    _report(recorded, out)
    return recorded.exit_code


def _split(arguments: list[str]) -> tuple[list[str], Path | None]:
    """Return the program and its arguments, and the value of an --out found before ``--``."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser("graphkit record", _USAGE, add_help=False, allow_abbrev=False)
    _add_out(parser)
    known, program = parser.parse_known_args(arguments[:end])
    return program + arguments[end + 1 :], known.out


def _check_program(program: list[str], *, is_module: bool) -> None:
    if not program:
        raise UsageError("no program to record. Give a SCRIPT or -m MODULE.")
    if not is_module and not exists(Path(program[0])):
        raise UsageError(f"cannot run {program[0]}: the file does not exist.")


def _report(recorded: RecordedProgram, out: Path) -> None:
    for pid, lost in recorded.lost_graphs.items():
        graphs = count_of(lost, "graph")
        print_message(f"left out {graphs} of process {pid}: not written completely")
    record = recorded.record
    if record is None:
        print_message(f"nothing recorded: {_why_nothing(recorded)}")
        return
    graphs = count_of(len(record.graphs), "graph")
    summary = f"recorded {graphs} of {count_of(len(record.processes), 'process')}"
    write_output(out, record.to_json(), summary)


def _why_nothing(recorded: RecordedProgram) -> str:
    if recorded.lost_graphs:
        return "no graph was written completely"
    if not recorded.imported_torch:
        return "the program did not import torch"
    import torch

    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    return "the program captured no graph"
