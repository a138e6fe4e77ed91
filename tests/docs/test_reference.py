"""The generated reference: every public name and every option once, each with a description."""

import re
from importlib import import_module

import pytest

pytest.importorskip("docutils")

import api_reference
import command_reference
import graphkit
from docstring_sections import as_lists
from documentation_blocks import PAGES
from graphkit.cli.parser import build_parser

API = api_reference.pages()
COMMANDS = command_reference.pages()
DESCRIBED = {
    match[1] or f"{match[3]}.{match[2]}": page
    for page, text in API.items()
    for match in re.finditer(
        r"^\.\. (?:auto\w+:: (\S+)|py:data:: (\S+)\n   :module: (\S+))$", text, re.MULTILINE
    )
}
"""Page of every described name."""


def test_every_name_of_graphkit_is_described_with_its_subject():
    subjects = {page: names for page, _, names in api_reference.subjects()}
    assert [name for names in subjects.values() for name in names] == graphkit.__all__
    for page, names in subjects.items():
        assert {DESCRIBED.get(f"graphkit.{name}") for name in names} == {page}


@pytest.mark.parametrize("package", api_reference.packages())
def test_every_name_of_a_package_is_described_once(package):
    for name in import_module(package).__all__:
        own, link = f"{package}.{name}" in DESCRIBED, f":py:obj:`{name} <" in API[package]
        assert own != link, name
        if link:
            assert re.search(rf"`{name} <(\S+)>`", API[package])[1] in DESCRIBED


def test_every_name_has_a_summary():
    summaries = {
        match[1]: match[2]
        for text in API.values()
        for match in re.finditer(r"\* - :py:obj:`~(\S+)`\n     - (.*)", text)
    }
    assert summaries.keys() == DESCRIBED.keys()
    assert not [name for name, text in summaries.items() if not text.endswith((".", "``."))]


def test_every_option_of_every_command_is_described():
    parsers = {"index": build_parser()} | command_reference.commands(build_parser())
    assert COMMANDS.keys() == parsers.keys()
    for name, parser in parsers.items():
        described = re.findall(r"^\.\. option:: (.*)$", COMMANDS[name], re.MULTILINE)
        flags = {form.split()[0] for forms in described for form in forms.split(", ")}
        assert {flag for each in parser._actions for flag in each.option_strings} <= flags
        assert "xit code" in COMMANDS[name]
        assert parser.prog in COMMANDS[name]


def test_sections_of_docstrings_become_lists():
    lines = [
        "Summary.",
        "",
        "Attributes:",
        "    mode, size: What it is,",
        "        and more.",
        "",
        "Shapes:",
        "    [B] int64: no name.",
    ]
    assert [line for line in as_lists(lines) if line] == [
        "Summary.",
        ".. rubric:: Attributes",
        "- ``mode``, ``size``: What it is,",
        "  and more.",
        ".. rubric:: Shapes",
        "- [B] int64: no name.",
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_refers_to_described_names(page):
    """Sphinx prints a reference that it cannot resolve as text, without a warning."""
    assert {*re.findall(r"\{py:obj\}`~(\S+)`", page.read_text())} <= DESCRIBED.keys()
