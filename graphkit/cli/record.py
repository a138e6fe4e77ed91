"""``graphkit record``: run a Python program and record every CUDA graph that it captures."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from graphkit.cli.exits import DONE, FAILED, NO_DEVICE, USAGE, UsageError
from graphkit.cli.options import exists, parse_count, refuse_options
from graphkit.cli.output import check_writable, print_message, print_result, write_output
from graphkit.records import count_of
from graphkit.records.audit import NOT_CHECKED, SEVERITIES

if TYPE_CHECKING:
    from graphkit.audit.foreign import RecordedProgram

_USAGE = """graphkit record [-h] [--out F] [--audit | --lock F | --check F]
                       (SCRIPT | -m MODULE) [ARGS ...]"""

_FOR_AUDITS = "applies to an audit. Add --audit, or leave it out."


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "record",
        help="run a Python program and record its CUDA graphs",
        usage=_USAGE,
        description="Run a Python program unchanged and write one record of every CUDA graph that "
        "torch captures in it and in its child processes.",
        epilog="""
Arguments after SCRIPT or MODULE belong to the program.

The exit code is the program's own; 128 plus the signal's number if a signal ended it. If the
program itself ends with 0, --audit exits with 3 if nothing could be audited, with 2 if the report
cannot be written, and with 1 if a finding is at least as severe as --fail-on. --lock and --check
exit with 3 if no graph was captured, and --check with 1 if a graph differs from its lock.

GRAPHKIT_AUDIT=report.json in the environment audits a process without this command.

Examples:
  graphkit record --out serve.json serve.py --port 8000
  graphkit record -m my_engine.serve --port 8000
  graphkit record --audit --fail-on error serve.py --port 8000
  graphkit record --lock graphs.lock -- bench.py --batch-size 8
  graphkit record --check graphs.lock -- bench.py --batch-size 8
  graphkit record train.py --out model.pt
""",
    )
    parser.add_argument(
        "--out", type=Path, metavar="F",
        help="write the record as JSON to file F; default: graphkit-record.json",
    )  # fmt: skip
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--lock", type=Path, metavar="F",
        help="run the program twice, and write nodes and arguments of its graphs to lock file F",
    )  # fmt: skip
    what.add_argument(
        "--check", type=Path, metavar="F", help="compare the program's graphs with lock file F"
    )
    what.add_argument(
        "--audit", action="store_true",
        help="audit the graphs instead of recording them; default of --out: graphkit-audit.json",
    )  # fmt: skip
    parser.add_argument(
        "--every", type=parse_count, metavar="N",
        help="with --audit: repeat every N-th replay of a graph with poisoned memory; default: "
        "the first alone",
    )  # fmt: skip
    parser.add_argument(
        "--find-fault", action="store_true",
        help="with --audit: wait for each replay; if one fails, run the program again and name "
        "the node",
    )  # fmt: skip
    parser.add_argument(
        "--json",
        action="store_true",
        help="with --audit or --check: print the report as JSON, not as text",
    )
    parser.add_argument(
        "--fail-on", choices=SEVERITIES,
        help="with --audit: exit with 1 if a finding is at least this severe",
    )  # fmt: skip
    parser.add_argument(
        "-m", dest="module", nargs=argparse.REMAINDER,
        help="a module to run, as python -m runs it, and its arguments",
    )  # fmt: skip
    parser.add_argument(
        "script", nargs=argparse.REMAINDER, metavar="SCRIPT",
        help="the file of the program, and its arguments",
    )  # fmt: skip
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return the program's exit code."""
    from graphkit.audit.foreign import record_program

    is_module = arguments.module is not None
    program = [*(arguments.module or ()), *arguments.script]
    program = program[program[:1] == ["--"] :]
    name = "graphkit-audit.json" if arguments.audit else "graphkit-record.json"
    out = arguments.lock or arguments.out or Path(name)
    if not program:
        raise UsageError("no program to record. Give a SCRIPT or -m MODULE.")
    if not is_module and not exists(Path(program[0])):
        raise UsageError(f"cannot run {program[0]}: the file does not exist.")
    if arguments.lock or arguments.check:
        why = "has no effect with --lock and --check: they write no record. Leave it out."
        refuse_options(arguments, ("out",), why)
    command = ["-m", *program] if is_module else program
    if arguments.check:
        refuse_options(arguments, ("every", "find_fault", "fail_on"), _FOR_AUDITS)
        return _check(command, arguments)
    check_writable(out)
    if arguments.audit:
        return _audit(command, out, arguments)
    refuse_options(arguments, ("every", "find_fault", "json", "fail_on"), _FOR_AUDITS)
    if arguments.lock:
        return _lock(command, out)
    recorded = record_program(command)
    _report(recorded, out)
    return recorded.exit_code


def _audit(program: list[str], out: Path, arguments: argparse.Namespace) -> int:
    """Audit the program. The text goes to stderr, because stdout is the program's."""
    from graphkit.audit.foreign import AuditOptions, audit_program

    options = AuditOptions(
        report=out.absolute(), every=arguments.every or 0, find_fault=arguments.find_fault
    )
    audited = audit_program(program, options)
    report = audited.report
    if arguments.json:
        print_result(report.to_json())
    if not report.has_checked:
        reasons = dict.fromkeys(check.text.removeprefix(NOT_CHECKED) for check in report.checks)
        print_message(f"nothing audited: {'; '.join(reasons)}")
    elif not arguments.json:
        from graphkit.views import findings_view

        print_message(findings_view(report))
    try:
        write_output(out, report.to_json())
    except UsageError as error:
        print_message(f"error: {error}")
        return audited.exit_code or USAGE
    if audited.exit_code:
        return audited.exit_code
    worst = SEVERITIES.index(arguments.fail_on) if arguments.fail_on else -1
    if any(SEVERITIES.index(finding.severity) <= worst for finding in report.findings):
        return FAILED
    return DONE if report.has_checked else NO_DEVICE


def _lock(program: list[str], out: Path) -> int:
    """Run the program twice, and write the lock of its graphs."""
    from graphkit.audit.baseline import program_lock
    from graphkit.audit.foreign import record_program

    first, second = record_program(program), record_program(program)
    exit_code = first.exit_code or second.exit_code
    if first.record is None or second.record is None:
        print_message(f"nothing locked: {_why_nothing(second if first.record else first)}")
        return exit_code or NO_DEVICE
    lock = program_lock(first.record, second.record)
    write_output(out, lock.to_json(), f"locked {count_of(len(lock.graphs), 'graph')}")
    return exit_code


def _check(program: list[str], arguments: argparse.Namespace) -> int:
    """Compare the graphs of the program with a lock. The text goes to stderr, as of an audit."""
    from graphkit.audit.baseline import check_program_lock
    from graphkit.audit.foreign import record_program
    from graphkit.records import GraphBaseline
    from graphkit.views import findings_view

    lock = GraphBaseline.load(arguments.check)
    recorded = record_program(program)
    if recorded.record is None:
        print_message(f"nothing compared: {_why_nothing(recorded)}")
        return recorded.exit_code or NO_DEVICE
    report = check_program_lock(lock, recorded.record)
    if arguments.json:
        print_result(report.to_json())
    else:
        print_message(findings_view(report))
    return recorded.exit_code or (FAILED if report.findings else DONE)


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
    from graphkit.audit.foreign import why_no_graph

    if recorded.lost_graphs:
        return "no graph was written completely"
    return why_no_graph(recorded.imported_torch)
