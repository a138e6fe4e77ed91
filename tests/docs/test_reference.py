"""The generated reference: every public name and every option once, each with a description."""

import re
from importlib import import_module

import pytest

pytest.importorskip("sphinx.application")

import api_reference
import command_reference
import graphkit
from docstring_sections import as_lists
from documentation_blocks import PAGES
from graphkit.cli import build_parser


@pytest.fixture(scope="module")
def api():
    """Text of each page of the reference of names."""
    return api_reference.pages()


@pytest.fixture(scope="module")
def commands():
    """Text of each page of the reference of commands."""
    return command_reference.pages()


@pytest.fixture(scope="module")
def described(api):
    """Page of every described name."""
    return {
        match[1] or f"{match[3]}.{match[2]}": page
        for page, text in api.items()
        for match in re.finditer(
            r"^\.\. (?:auto\w+:: (\S+)|py:data:: (\S+)\n   :module: (\S+))$", text, re.MULTILINE
        )
    }


def test_every_name_of_graphkit_is_described_with_its_subject(described):
    subjects = {page: names for page, _, names in api_reference.subjects()}
    assert sorted(name for names in subjects.values() for name in names) == sorted(graphkit.__all__)
    for page, names in subjects.items():
        assert {described.get(f"graphkit.{name}") for name in names} == {page}


@pytest.mark.parametrize("package", api_reference.packages())
def test_every_name_of_a_package_is_described_once(package, api, described):
    for name in import_module(package).__all__:
        own, link = f"{package}.{name}" in described, f":py:obj:`{name} <" in api[package]
        assert own != link, name
        if link:
            assert re.search(rf"`{name} <(\S+)>`", api[package])[1] in described


def test_every_name_has_a_summary(api, described):
    summaries = {
        match[1]: match[2]
        for text in api.values()
        for match in re.finditer(r"\* - :py:obj:`~(\S+)`\n     - (.*)", text)
    }
    assert summaries.keys() == described.keys()
    assert not [name for name, text in summaries.items() if not text.endswith((".", "``."))]


def test_every_option_of_every_command_is_described(commands):
    parsers = {"index": build_parser()} | command_reference.commands(build_parser())
    assert commands.keys() == parsers.keys()
    for name, parser in parsers.items():
        options = re.findall(r"^\.\. option:: (.*)$", commands[name], re.MULTILINE)
        flags = {form.split()[0] for forms in options for form in forms.split(", ")}
        assert {flag for each in parser._actions for flag in each.option_strings} <= flags
        assert "xit code" in commands[name]
        assert parser.prog in commands[name]


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
def test_a_page_refers_to_described_names(page, described):
    """Sphinx prints a reference that it cannot resolve as text, without a warning."""
    assert {*re.findall(r"\{py:obj\}`~(\S+)`", page.read_text())} <= described.keys()
