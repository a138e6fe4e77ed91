"""``graphkit record``: run any Python program and record every CUDA graph that it captures."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from graphkit.cli.exits import UsageError
from graphkit.cli.files import check_writable, write_whole
from graphkit.cli.screen import note

if TYPE_CHECKING:
    from graphkit.recording import Recorded

_USAGE = "graphkit record [-h] [--out F] (SCRIPT | -m MODULE) [ARGS ...]"


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command's words."""
    parser = commands.add_parser(
        "record",
        help="run a program and record its CUDA graphs",
        usage=_USAGE,
        description="Run a Python program unchanged, its child processes too, and write one record "
        "of every CUDA graph that torch captured in it. The exit code is the program's own.",
        epilog="--out may also stand among ARGS. Words after -- are always the program's: "
        "graphkit record train.py -- --out model.pt",
    )
    _add_out(parser)
    parser.add_argument(
        "-m", dest="module", nargs=argparse.REMAINDER, help="run a module, as python -m does"
    )
    parser.add_argument(
        "script", nargs=argparse.REMAINDER, metavar="SCRIPT", help="the program, then its words"
    )
    parser.set_defaults(run=run)


def _add_out(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out", type=Path, metavar="F", help="the record; default: graphkit-record.json"
    )


def run(arguments: argparse.Namespace) -> int:
    """Do it; returns the exit code."""
    from graphkit.recording import record_program

    program, out = _split([*(arguments.module or ()), *arguments.script])
    out = out or arguments.out or Path("graphkit-record.json")
    _check(program, is_module=arguments.module is not None)
    check_writable(out)
    recorded = record_program(["-m", *program] if arguments.module is not None else program)
    _report(recorded, out)
    return recorded.exit_code


def _split(words: list[str]) -> tuple[list[str], Path | None]:
    """The program's words, and our own among those before ``--``."""
    end = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser("graphkit record", _USAGE, add_help=False, allow_abbrev=False)
    _add_out(parser)
    ours, program = parser.parse_known_args(words[:end])
    return program + words[end + 1 :], ours.out


def _check(program: list[str], *, is_module: bool) -> None:
    if not program:
        raise UsageError("no program to record: give a SCRIPT or -m MODULE.")
    if not is_module and not Path(program[0]).exists():
        raise UsageError(f"cannot run {program[0]}: there is no such file.")


def _report(recorded: Recorded, out: Path) -> None:
    for pid, lost in recorded.lost.items():
        note(f"left out {_count(lost, 'graph')} of process {pid}: not recorded to the end")
    record = recorded.record
    if record is None:
        note(f"nothing to record: {_why_nothing(recorded)}")
        return
    write_whole(out, record.to_json())
    graphs, processes = len(record.graphs), len(record.processes)
    note(f"recorded {_count(graphs, 'graph')} of {_count(processes, 'process')}: wrote {out}")


def _why_nothing(recorded: Recorded) -> str:
    if recorded.lost:
        return "no graph was recorded to the end"
    if not recorded.imported_torch:
        return "the program never imported torch"
    import torch

    if not torch.cuda.is_available():
        return "no CUDA device seen by torch"
    return "no graph was captured"


def _count(number: int, noun: str) -> str:
    plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{number} {noun if number == 1 else plural}"
