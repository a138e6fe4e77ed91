"""The public names: ``graphkit.__all__`` is complete, grouped, documented, and loads lazily."""

from __future__ import annotations

import inspect
import pkgutil
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import graphkit
import graphkit.lazy_names
from graphkit.lazy_names import stub_names

STUB = Path(graphkit.__file__).with_suffix(".pyi")
DECLARED = {name: stub_names(graphkit.__file__)[name] for name in graphkit.__all__}
PUBLIC = {name: getattr(graphkit, name) for name in graphkit.__all__}


def groups():
    """Names of each subject of the stub, which comments separate."""
    subjects = re.split(r"^# .*\.$", STUB.read_text(encoding="utf-8"), flags=re.MULTILINE)[2:-1]
    return [re.findall(r"(\w+) as \w+", subject) for subject in subjects]


def lazy_packages():
    """Every package of graphkit whose names a stub lists."""
    root = STUB.parent.resolve()
    places = [root, *(path.resolve() for path in root.iterdir() if path.is_symlink())]
    for place in places:
        for stub in place.rglob("*.pyi"):
            above = stub.parent.relative_to(place).parts
            yield ".".join(["graphkit", *([] if place == root else [place.name]), *above])


def test_the_stub_lists_names_by_subject_and_each_once():
    assert len(groups()) > 5
    names = [name for subject in groups() for name in subject]
    assert names == graphkit.__all__
    assert len(names) == len(set(names))


@pytest.mark.parametrize("package", sorted(lazy_packages()))
def test_the_names_of_a_lazy_package_load(package):
    """A name that is that of a module, too, would be the module once that is imported."""
    module = import_module(package)
    modules = {info.name for info in pkgutil.iter_modules(module.__path__)}
    assert not modules & {*module.__all__}
    for name, room in stub_names(module.__file__).items():
        if room != package:
            assert getattr(module, name) is getattr(import_module(room), name)


def test_the_core_and_the_large_rooms_are_lazy():
    rooms = {"audit", "buffers", "engine", "graphs", "models", "records", "runners", "testing"}
    assert {f"graphkit.{room}" for room in rooms} <= {*lazy_packages()}


def test_a_name_is_what_its_room_holds_and_lists():
    """Rooms that are single modules have no list of their own."""
    for name in graphkit.__all__:
        room = import_module(DECLARED[name])
        assert getattr(graphkit, name) is getattr(room, name)
        assert name in getattr(room, "__all__", [name])


def test_a_name_is_looked_up_once(monkeypatch):
    graphkit.SizeTable  # noqa: B018
    monkeypatch.setattr(graphkit.lazy_names, "import_module", None)
    assert graphkit.SizeTable is import_module("graphkit.graphs").SizeTable


def test_names_have_docstrings_of_their_own():
    for name, thing in PUBLIC.items():
        if inspect.isclass(thing) or inspect.isfunction(thing):
            text = vars(thing).get("__doc__") if inspect.isclass(thing) else thing.__doc__
            assert text, name
            assert not text.startswith(f"{name}("), "a dataclass wrote its own"


def test_public_methods_have_docstrings():
    bare = [
        f"{name}.{member}"
        for name, thing in PUBLIC.items()
        if inspect.isclass(thing) and thing.__module__.startswith("graphkit")
        for member, value in vars(thing).items()
        if not member.startswith("_")
        and (inspect.isfunction(value) or isinstance(value, (property, classmethod)))
        and not inspect.getdoc(getattr(thing, member))
    ]
    assert not bare


def test_the_names_of_every_mode_are_public():
    kinds = ("Runner", "Inputs", "InputBuffers", "Output")
    for room in ("graphkit.runners", "graphkit.buffers"):
        names = {name for name in import_module(room).__all__ if name.endswith(kinds)}
        assert names <= set(graphkit.__all__)


def annotations(thing):
    """Every annotation of a public class or function, its public methods and fields included."""
    if inspect.isfunction(thing):
        yield from inspect.get_annotations(thing).values()
    if inspect.isclass(thing):
        own = inspect.get_annotations(thing)
        yield from (text for name, text in own.items() if not name.startswith("_"))
        for name, member in vars(thing).items():
            function = getattr(member, "__func__", getattr(member, "fget", member))
            if inspect.isfunction(function) and (not name.startswith("_") or name == "__init__"):
                arguments = inspect.get_annotations(function).items()
                yield from (text for name, text in arguments if not name.startswith("_"))


def test_everything_that_a_public_signature_mentions_is_exported():
    rooms = [import_module(room) for room in {*DECLARED.values()}]
    exported = {*graphkit.__all__}.union(*(getattr(room, "__all__", ()) for room in rooms))
    ours = {
        name
        for module in list(sys.modules.values())
        if module.__name__.startswith("graphkit.")
        for name, value in vars(module).items()
        if inspect.isclass(value) and not name.startswith("_")
        if value.__module__.startswith("graphkit.")
    }
    for name in graphkit.__all__:
        words = re.findall(r"\w+", " ".join(map(str, annotations(getattr(graphkit, name)))))
        assert {*words} & ours <= exported, name


def test_dir_lists_the_names_before_they_are_loaded():
    code = "import graphkit; print(*dir(graphkit))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    names = done.stdout.split()
    assert names == sorted(names)
    assert {*graphkit.__all__, "__version__"} <= set(names)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'graphkit' has no attribute 'Nothing'"):
        _ = graphkit.Nothing
    assert not hasattr(graphkit, "_private")
    assert getattr(graphkit, "absent", 5) == 5


def test_from_import_of_an_unknown_name_is_an_import_error():
    with pytest.raises(ImportError, match="Nothing"):
        exec("from graphkit import Nothing", {})


def test_star_import_brings_exactly_the_list():
    space: dict[str, object] = {}
    exec("from graphkit import *", space)
    assert set(space) - {"__builtins__"} == set(graphkit.__all__)


def test_version_is_that_of_the_distribution():
    from importlib.metadata import version

    assert graphkit.__version__ == version("graphkit-cuda")
