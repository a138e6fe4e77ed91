"""Writes the pages of the API reference from the public names of graphkit.

A name is described once: on the page of its subject if ``graphkit.__all__`` lists it, else on the
page of the first package whose ``__all__`` does. Packages link to the names that are described
elsewhere. The pages are text for autodoc, written to ``reference/api`` before Sphinx reads it.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from importlib import import_module
from itertools import takewhile
from pathlib import Path
from types import ModuleType
from typing import Any

from sphinx.application import Sphinx
from sphinx.pycode import ModuleAnalyzer

import graphkit
from generated_pages import write_pages

SUBJECTS = {
    "settings": "Settings",
    "inputs": "Inputs",
    "outputs": "Outputs",
    "runners": "Runners",
    "functions": "Captured functions",
    "ranks": "Several GPUs",
    "backends": "Backends of capture and attention",
    "pools": "KV pools",
    "inspection": "Inspection and records",
    "targets": "Targets and audits",
    "foreign_graphs": "Graphs of other programs",
    "step": "The whole step",
    "engine": "Engine",
    "errors": "Errors",
}
"""Page and title of each subject, in the order of ``graphkit/__init__.pyi``."""


def packages() -> dict[str, ModuleType]:
    """Return the packages of graphkit that list public names, by name."""
    root = Path(graphkit.__file__).parent
    folders = sorted(path.parent.relative_to(root.parent) for path in root.glob("*/**/__init__.py"))
    names = [".".join(folder.parts) for folder in folders]
    modules = {name: import_module(name) for name in names}
    return {name: each for name, each in modules.items() if hasattr(each, "__all__")}


def subjects() -> Iterator[tuple[str, str, list[str]]]:
    """Yield page, description and names of each subject, which comments of the stub separate."""
    text = Path(graphkit.__file__).with_suffix(".pyi").read_text(encoding="utf-8")
    parts = re.split(r"^# (.*)$", text, flags=re.MULTILINE)[1:]
    first = next(i for i, about in enumerate(parts) if about.startswith("Settings"))
    subjects = zip(parts[first::2], parts[first + 1 :: 2], strict=True)
    for page, (about, names) in zip(SUBJECTS, subjects, strict=False):  # the last is no subject
        yield page, about, sorted(re.findall(r"(\w+) as \w+", names))


def pages() -> dict[str, str]:
    """Return the text of every page of the reference by file name."""
    described: dict[int, str] = {}
    texts: dict[str, str] = {}
    for page, about, names in subjects():
        described |= {id(getattr(graphkit, name)): f"graphkit.{name}" for name in names}
        if page == "errors":  # its module shows the hierarchy
            about = inspect.getdoc(import_module("graphkit.errors")) or about
        texts[page] = _page(SUBJECTS[page], about, "graphkit", names, {})
    for name, package in packages().items():
        elsewhere, own = {}, []
        for each in sorted(package.__all__):
            where = described.setdefault(id(getattr(package, each)), f"{name}.{each}")
            if where == f"{name}.{each}":
                own.append(each)
            else:
                elsewhere[each] = where
        texts[name] = _page(name, inspect.getdoc(package) or "", name, own, elsewhere)
    return texts


def _page(title: str, about: str, module: str, names: list[str], elsewhere: dict[str, str]) -> str:
    """Return a page with a table of its names, links to other names, and the descriptions."""
    lines = [title, "=" * len(title), "", about, ""]
    if names:
        lines += [".. list-table::", "   :widths: 30 70", "   :class: names", ""]
        for name in names:
            lines += [f"   * - :py:obj:`~{module}.{name}`", f"     - {_summary(module, name)}"]
        lines += [""]
    if elsewhere:
        links = ", ".join(f":py:obj:`{name} <{where}>`" for name, where in elsewhere.items())
        lines += [f"Described with other subjects: {links}.", ""]
    for name in names:
        lines += [*_description(module, name), ""]
    return "\n".join(lines)


def _summary(module: str, name: str) -> str:
    """Return the first sentence of the description of a name."""
    thing = getattr(import_module(module), name)
    text = _constant_doc(module, name) if _is_constant(name, thing) else inspect.getdoc(thing) or ""
    return re.split(r"(?<=\.)\s|\n\n", text, maxsplit=1)[0].replace("\n", " ")


def _description(module: str, name: str) -> list[str]:
    """Return the directive that describes a name."""
    thing = getattr(import_module(module), name)
    if _is_constant(name, thing):
        text = [f"   {line}" for line in _constant_doc(module, name).splitlines()]
        return [f".. py:data:: {name}", f"   :module: {module}", "", *text]
    if inspect.isclass(thing):
        options = [":members:"]
        if any(base.__name__.startswith("_") for base in thing.__bases__):
            # The methods of a private base are those of the class itself, up to a public base.
            own = [thing, *takewhile(lambda base: not _is_public(base), thing.__mro__[1:])]
            others = {*_names(thing.__mro__[len(own) :])} - {*_names(own)}
            options += [":inherited-members: Enum", f":exclude-members: {', '.join(others)}"]
        elif thing.__bases__ != (object,):
            options.append(":show-inheritance:")
        return [f".. autoclass:: {module}.{name}", *(f"   {option}" for option in options)]
    return [f".. autofunction:: {module}.{name}"]


def _names(classes: Iterable[type]) -> Iterator[str]:
    """Yield the public names that classes define."""
    for each in classes:
        names = {**vars(each), **vars(each).get("__annotations__", {})}
        yield from (name for name in names if not name.startswith("_"))


def _is_public(base: type) -> bool:
    return getattr(graphkit, base.__name__, None) is base


def _is_constant(name: str, thing: Any) -> bool:
    """Return whether a name is an assigned value or an alias of a type."""
    return not (inspect.isclass(thing) or callable(thing)) or thing.__name__ != name


@cache
def _constant_doc(module: str, name: str) -> str:
    """Return the text below the assignment of a constant, in whatever module that is."""
    thing = getattr(import_module(module), name)
    for each, holder in sorted(sys.modules.items()):
        if each.startswith("graphkit.") and vars(holder).get(name) is thing:
            docs = ModuleAnalyzer.for_module(each).find_attr_docs()
            if ("", name) in docs:
                return "\n".join(docs["", name]).strip()
    return ""


def _write(app: Sphinx) -> None:
    write_pages(app, "api", pages())


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the extension."""
    app.connect("builder-inited", _write)
    return {"parallel_read_safe": True}
