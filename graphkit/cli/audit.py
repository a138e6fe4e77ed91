"""``graphkit audit``: is what the graphs of a target replay what was meant?"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import RenderableType

from graphkit.cli.capturing import REFERENCE, Subject, add_target_options, subject_of
from graphkit.cli.exits import DONE, FAILED, UsageError
from graphkit.cli.files import check_writable, write_whole
from graphkit.cli.screen import note, progress_on_stderr, show
from graphkit.records import AuditReport, LockRecord


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command's words."""
    parser = commands.add_parser(
        "audit",
        help="look for frozen values, stray pointers, leaking pads and what else goes wrong",
        description="Audit the graphs of a target, mode by mode. An error, other than a warning, "
        "ends with exit code 1.",
    )
    parser.add_argument(
        "target", nargs="?", default=REFERENCE, metavar="TARGET",
        help="package.module:attribute as for capture; default: the reference model",
    )  # fmt: skip
    add_target_options(parser)
    parser.add_argument(
        "--only", type=_names, metavar="baked,pads",
        help="these audits alone, of warmup, baked, pointers, pads, shadow, misses; default: all, "
        "with --check none",
    )  # fmt: skip
    locking = parser.add_mutually_exclusive_group()
    locking.add_argument(
        "--lock", type=Path, metavar="F", help="write what the graphs consist of; no audit"
    )
    locking.add_argument(
        "--check", type=Path, metavar="F", help="say what changed since --lock wrote the file"
    )
    parser.add_argument("--out", type=Path, metavar="F", help="write the AuditReport as JSON")
    parser.add_argument("--json", action="store_true", help="print the report instead of text")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Do it; returns the exit code."""
    if arguments.lock is not None:
        _check_alone(arguments)
        check_writable(arguments.lock)
        return _write_lock(arguments.lock, subject_of(arguments.target, arguments))
    if arguments.out is not None:
        check_writable(arguments.out)
    lock = None if arguments.check is None else LockRecord.load(arguments.check)
    subject = subject_of(arguments.target, arguments)
    report = _audited(subject, arguments, lock)
    show(report.to_json() if arguments.json else _view(report))
    if arguments.out is not None:
        write_whole(arguments.out, report.to_json())
        note(f"wrote {arguments.out}")
    return FAILED if any(each.severity == "error" for each in report.findings) else DONE


def _check_alone(arguments: argparse.Namespace) -> None:
    """Refuse what a lock would not heed."""
    of_audits = {"--only": arguments.only, "--out": arguments.out, "--json": arguments.json}
    for word, value in of_audits.items():
        if value:
            raise UsageError(
                f"--lock audits nothing: {word} says what of an audit to do or to keep. "
                "Leave it out."
            )


def _audited(
    subject: Subject, arguments: argparse.Namespace, lock: LockRecord | None
) -> AuditReport:
    from graphkit.audit import audit_target

    only = arguments.only
    if only is None and lock is not None:
        only = []  # the lock alone
    with progress_on_stderr() as progress:
        return audit_target(
            subject.target,
            only=only,
            modes=subject.modes,
            batch_sizes=subject.batch_sizes,
            device=subject.device,
            lock=lock,
            progress=progress,
        )


def _write_lock(path: Path, subject: Subject) -> int:
    from graphkit.audit import lock_target

    lock = lock_target(
        subject.target,
        modes=subject.modes,
        batch_sizes=subject.batch_sizes,
        device=subject.device,
    )
    write_whole(path, lock.to_json())
    note(f"locked {len(lock.graphs)} graphs: wrote {path}")
    return DONE


def _view(report: AuditReport) -> RenderableType:
    from graphkit.views import audit_view

    return audit_view(report)


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise argparse.ArgumentTypeError(f"{text!r} names no audit, such as baked,pads")
    return names
