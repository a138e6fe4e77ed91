"""Writes the pages of the command reference from the parsers of the ``graphkit`` command.

The pages are text for Sphinx, written to ``reference/commands`` before Sphinx reads it.
"""

from __future__ import annotations

import argparse
import re
from functools import partial

from sphinx.application import Sphinx

from generated_pages import write_pages
from graphkit.cli import build_parser
from graphkit.cli.options import HelpFormatter

WIDTH = 88
EXIT_CODES = "The exit codes are those of :doc:`every command <index>`."


def pages() -> dict[str, str]:
    """Return the text of every page by file name: an index, and a page per command."""
    parser = build_parser()
    texts = {"index": _index(parser)}
    for name, command in commands(parser).items():
        texts[name] = _command(command)
    return texts


def commands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Return the parser of each command by name."""
    (found,) = (each for each in parser._actions if isinstance(each, argparse._SubParsersAction))
    return dict(found.choices)


def _index(parser: argparse.ArgumentParser) -> str:
    """Return the page of what all commands share, with links to them."""
    lines = [*_title("Command reference"), *_body(parser)]
    return "\n".join([*lines, ".. toctree::", "", *(f"   {name}" for name in commands(parser))])


def _command(parser: argparse.ArgumentParser) -> str:
    """Return the page of a command."""
    lines = [*_title(parser.prog), *_body(parser)]
    return "\n".join(lines if "xit code" in (parser.epilog or "") else [*lines, EXIT_CODES, ""])


def _body(parser: argparse.ArgumentParser) -> list[str]:
    parser.formatter_class = partial(HelpFormatter, width=WIDTH)
    usage = parser.format_usage().removeprefix("usage: ").splitlines()
    lines = [escaped(parser.description or ""), "", ".. code-block:: none", ""]
    lines += [f"   {line.removeprefix('       ')}" for line in usage]
    lines += ["", f".. program:: {parser.prog}", ""]
    for action in parser._actions:
        if not isinstance(action, argparse._SubParsersAction):
            lines += _option(action)
    for block in (parser.epilog or "").strip().split("\n\n"):
        lines += _block(block)
    return lines


def _option(action: argparse.Action) -> list[str]:
    """Return the description of an option or a positional argument."""
    if action.choices:
        value = "{" + ",".join(map(str, action.choices)) + "}"
    else:
        value = str(action.metavar or action.dest.upper()) if action.nargs != 0 else ""
    if action.nargs == argparse.REMAINDER:
        value = f"{value} ..." if action.metavar else "MODULE ..."
    forms = [f"{flag} {value}".strip() for flag in action.option_strings] or [value]
    return [f".. option:: {', '.join(forms)}", "", f"   {escaped(action.help or '')}", ""]


def _block(block: str) -> list[str]:
    """Return a paragraph of an epilog, or its literal lines below a heading or a sentence."""
    first, *rest = block.splitlines()
    if not any(line.startswith("  ") for line in rest):
        return [escaped(" ".join(block.split())), ""]
    is_heading = len(first.split()) < 3
    title = f".. rubric:: {first.rstrip(':')}" if is_heading else escaped(first)
    return [title, "", ".. code-block:: none", "", *(f"   {line[2:]}" for line in rest), ""]


def escaped(text: str) -> str:
    """Return text without markup."""
    return re.sub(r"([*`|_\\])", r"\\\1", text)


def _title(text: str) -> list[str]:
    return [text, "=" * len(text), ""]


def _write(app: Sphinx) -> None:
    write_pages(app, "commands", pages())


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the extension."""
    app.connect("builder-inited", _write)
    return {"parallel_read_safe": True}
