"""Runs the code blocks of a page of the documentation in order, and compares what they print.

A ``python`` block runs in the namespace of its page. A ``console`` block has commands after ``$``
and below them lines of their output. A ``text`` block directly after a ``python`` block has lines
of its output. ``...`` in such lines is any text. The line ``% gpu`` above a block says that it
needs a CUDA device, and ``% exit 1`` that its command ends with this code.
"""

from __future__ import annotations

import os
import re
import runpy
import shlex
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
from sybil import Document, Example, Sybil
from sybil.evaluators.python import PythonEvaluator
from sybil.parsers.myst import CodeBlockParser

from graphkit.cli import build_parser, main

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
README = ROOT / "README.md"


def marks_above(example: Example) -> list[str]:
    """Return the words of the ``%`` line directly above a block."""
    above = example.document.text[: example.region.start].rstrip("\n").rpartition("\n")[2]
    return above[1:].split() if above.startswith("%") else []


def needs_gpu(example: Example) -> bool:
    """Return whether a block runs on CUDA devices only."""
    return "gpu" in marks_above(example)


def page_of(path: Path) -> Document:
    """Parse a page."""
    parsers = [
        CodeBlockParser(language="python", evaluator=run_python),
        CodeBlockParser(language="console", evaluator=run_console),
        CodeBlockParser(language="text", evaluator=compare_text),
    ]
    return Sybil(parsers=parsers, pattern="*.md", path=str(DOCS)).parse(path)


def run_python(example: Example) -> None:
    """Run a block, and keep what it prints for the ``text`` block below."""
    with printed() as output:
        PythonEvaluator()(example)
    example.namespace["printed"] = output.getvalue()


def run_console(example: Example) -> None:
    """Run the commands of a block."""
    marks = marks_above(example)
    expected = int(marks[marks.index("exit") + 1]) if "exit" in marks else 0
    shown: list[str] = []
    with printed() as output:
        for line in example.parsed.splitlines():
            if not line.startswith("$ "):
                shown.append(line)
                continue
            name, *arguments = shlex.split(line[2:], comments=True)
            command = COMMANDS[name]
            assert command(arguments) == expected, (line, output.getvalue())
    check_output(shown, output.getvalue())


def readme_commands() -> Iterator[list[str]]:
    """Yield the commands of the README's list, which begin with the environment's programs."""
    for line in README.read_text(encoding="utf-8").splitlines():
        if line.startswith("    .venv/bin/"):
            yield shlex.split(line.strip().removeprefix(".venv/bin/"), comments=True)


def compare_text(example: Example) -> None:
    """Compare a block with what the Python block above it printed."""
    check_output(example.parsed.splitlines(), example.namespace["printed"])


def check_output(shown: list[str], output: str) -> None:
    """Check that the shown lines are in the output, in this order."""
    parts = [" ".join(line.split()) for line in shown if line.strip() not in ("", "...")]
    pattern = r"[\s\S]*".join(re.escape(part).replace(r"\.\.\.", ".*") for part in parts)
    assert re.search(pattern, "\n".join(" ".join(each.split()) for each in output.splitlines())), (
        f"expected\n{chr(10).join(parts)}\nin\n{output}"
    )


@contextmanager
def printed() -> Iterator[StringIO]:
    """Collect what is written to stdout and stderr."""
    output = StringIO()
    with redirect_stdout(output), redirect_stderr(output):
        yield output


def run_graphkit(arguments: list[str]) -> int:
    """Run a command; only parse ``record``, which starts a process and has tests of its own."""
    if arguments[0] == "record":
        build_parser().parse_args(arguments)
        return 0
    return main(arguments)


def run_pytest(arguments: list[str]) -> int:
    """Run pytest without the settings of this repository."""
    own = ["-c", os.devnull, "--rootdir", ".", "-p", "no:cacheprovider", "--capture=sys"]
    return int(pytest.main([*arguments, *own, "-W", "ignore"]))


def run_script(arguments: list[str]) -> int:
    try:
        runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def parse_torchrun(arguments: list[str]) -> int:
    """Parse the command that every rank runs; tests/distributed starts ranks."""
    build_parser().parse_args(arguments[arguments.index("graphkit") + 1 :])
    return 0


def check_install(arguments: list[str]) -> int:
    """Check that the extras exist."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = re.findall(r"\[(.*?)\]", arguments[-1])
    return int(not {*",".join(extras).split(",")} - {""} <= {*project["optional-dependencies"]})


def check_make(arguments: list[str]) -> int:
    """Check that the target exists."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    return int(not re.search(rf"^{arguments[0]}:", makefile, re.MULTILINE))


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "graphkit": run_graphkit,
    "make": check_make,
    "pip": check_install,
    "pytest": run_pytest,
    "python": run_script,
    "torchrun": parse_torchrun,
}
