"""Score graphkit's audit, and other tools, on programs with one bug of an issue each.

    python tools/graphbugs/score.py                   the table
    python tools/graphbugs/score.py --json F          the same, and a file of results to commit
    python tools/graphbugs/score.py --one FILE        the findings of one program

A bug counts as found if the first finding has its kind, and its line where a program marks one with
``# BUG``. Programs under ``sound/`` have no bug: an error or a warning is a false alarm. On CUDA
each program runs in a process of its own, also under compute-sanitizer if it is installed, and
under torch's liveness check (``check_input_liveness`` of ``torch.cuda.graph``) if torch has it.
"""

from __future__ import annotations

import argparse
import inspect
import json
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1])]
TOOLS = ("found", "liveness", "sanitizer")
MARK, TIMEOUT = "# BUG", 300
PROCESSES = 12
"""Programs that run at once on CUDA. They have little memory, and most of their time is imports."""


@dataclass(frozen=True)
class Result:
    """What was found in a program.

    Attributes:
        name: Its file, without suffix.
        issue: The issue that it is made from; empty for sound programs.
        kind: The kind of finding that is right.
        found: ``yes``, ``no``, or ``-`` where the program needs a device.
        first: Kind and line of the first finding.
        text: The first finding.
        liveness, sanitizer: As ``found``, for torch and compute-sanitizer.
    """

    name: str
    issue: str
    kind: str
    found: str
    first: str = ""
    text: str = ""
    liveness: str = "-"
    sanitizer: str = "-"


def programs() -> list[Path]:
    """Return all programs, those with bugs first."""
    return [
        path for folder in ("programs", "sound") for path in sorted((HERE / folder).glob("*.py"))
    ]


def findings_of(path: Path) -> list[dict[str, Any]]:
    """Run a program under the audit in this process, and return its errors and warnings."""
    from graphbugs import frame

    with tempfile.TemporaryDirectory() as folder:
        report = frame.audited(path, Path(folder) / "report.json")
    return [
        {"kind": f.kind, "source": f.source, "text": f.text, "severity": f.severity}
        for f in report.findings
        if f.severity != "note"
    ]


def judged(path: Path, findings: list[dict[str, Any]], **others: str) -> Result:
    """Return whether the first finding is the bug of a program."""
    text = path.read_text(encoding="utf-8")
    issue = re.match(r'"""([\w./-]+#\d+):', text)
    kind = re.search(r'^KIND(?:, NEEDS)? = "([a-z ]+)"', text, re.MULTILINE)
    lines = [number for number, line in enumerate(text.splitlines(), 1) if MARK in line]
    first = findings[0] if findings else {"kind": "", "source": "", "text": ""}
    is_there = not lines or f"{path.name}:{lines[0]} " in first["source"]
    is_found = first["kind"] == kind[1] and is_there if kind else bool(findings)
    return Result(
        path.stem, issue[1] if issue else "", kind[1] if kind else "",
        "yes" if is_found else "no", f"{first['kind']} {first['source']}".strip(), first["text"],
        **others,
    )  # fmt: skip


def scored(path: Path) -> Result:
    """Run a program under each tool."""
    import torch

    if not torch.cuda.is_available():
        if 'NEEDS = "cuda"' in path.read_text(encoding="utf-8"):
            return replace(judged(path, []), found="-")
        return judged(path, findings_of(path))
    run = _run(path, "--one")
    try:
        findings = json.loads(run.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        findings = [{"kind": "failed", "source": "", "text": run.stderr[-300:]}]
    return judged(path, findings, liveness=_liveness(path), sanitizer=_sanitizer(path))


def _liveness(path: Path) -> str:
    import torch

    if "check_input_liveness" not in inspect.signature(torch.cuda.graph.__init__).parameters:
        return "-"
    return "yes" if _run(path, "--liveness").returncode else "no"


def _sanitizer(path: Path) -> str:
    tool = shutil.which("compute-sanitizer") or shutil.which(
        "/usr/local/cuda/bin/compute-sanitizer"
    )
    if tool is None:
        return "-"
    run = _run(path, "--plain", before=[tool, "--tool", "memcheck"])
    errors = re.search(r"ERROR SUMMARY: (\d+) error", run.stdout + run.stderr)
    return "-" if errors is None else "no" if errors[1] == "0" else "yes"


def _run(path: Path, how: str, before: Any = ()) -> Any:
    command = [*before, sys.executable, __file__, how, str(path)]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    except subprocess.TimeoutExpired as error:
        return subprocess.CompletedProcess(command, 0, "", str(error))


def plain(path: Path, *, liveness: bool) -> None:
    """Run a program without the audit."""
    import torch
    from graphbugs import frame

    if liveness:
        graph: Any = torch.cuda.graph
        frame.capture = lambda one: graph(one, check_input_liveness=True)
    frame.load(path).program()
    torch.cuda.synchronize()


def sums(results: list[Result]) -> dict[str, dict[str, int]]:
    """Return for bugs and for sound programs how many ran, and in how many each tool found one."""
    counted = {}
    for name, is_bug in (("bugs", True), ("sound", False)):
        ran = [one for one in results if bool(one.kind) == is_bug and one.found != "-"]
        found = {tool: sum(getattr(one, tool) == "yes" for one in ran) for tool in TOOLS}
        counted[name] = {"ran": len(ran), **found}
    return counted


def as_json(results: list[Result]) -> str:
    """Return the results with device and versions, one program a line, so that diffs are short."""
    import torch

    from graphkit.graphs import environment

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    head = {"environment": asdict(environment(device)), "sums": sums(results)}
    facts = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
    lines = ",\n".join(f"  {json.dumps(asdict(one))}" for one in results)
    return "{\n" + ",\n".join([*facts, ' "programs": [\n' + lines + "\n ]"]) + "\n}\n"


def table(results: list[Result]) -> str:
    """Return the results as text, with their sums."""
    lines = [
        f"{'program':<28}{'kind':<20}{'graphkit':<10}{'liveness':<10}{'sanitizer':<11}first finding"
    ]
    lines += [
        f"{one.name:<28}{one.kind or 'sound':<20}{one.found:<10}{one.liveness:<10}"
        f"{one.sanitizer:<11}{one.first}".rstrip()
        for one in results
    ]
    for name, counts in sums(results).items():
        ran, *tools = counts.items()
        lines.append(f"{name}: {ran[1]} ran; {', '.join(f'{tool} {n}' for tool, n in tools)}")
    return "\n".join(lines)


def main() -> int:
    """Run the command."""
    import torch

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--json", type=Path, metavar="F", help="write the results as JSON, with device and versions"
    )
    parser.add_argument("--only", metavar="TEXT", help="run programs whose name has this text")
    for how in ("--one", "--plain", "--liveness"):
        parser.add_argument(how, type=Path, metavar="FILE", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(findings_of(arguments.one)))
        return 0
    if arguments.plain or arguments.liveness:
        plain(arguments.plain or arguments.liveness, liveness=bool(arguments.liveness))
        return 0
    chosen = [path for path in programs() if (arguments.only or "") in path.stem]
    with ThreadPoolExecutor(PROCESSES if torch.cuda.is_available() else 1) as pool:
        results = list(pool.map(scored, chosen))
    print(table(results))
    if arguments.json:
        arguments.json.write_text(as_json(results), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
