"""Targets are found by ``package.module:attribute``; every refusal has one line."""

from __future__ import annotations

import importlib
import itertools
import sys

import pytest

from graphkit.audit.locate_target import locate
from graphkit.errors import DeviceError, TargetError
from graphkit.runners.targets import CaptureTarget

names = (f"graphkit_tests_target_{number}" for number in itertools.count())

SOURCE = """
import functools
import torch
import graphkit as gk

def make(**facts):
    return gk.CaptureTarget(
        **{"name": "tiny", "spec": gk.SpecConfig("EAGLE", 3, 1, 4),
        "sizes": gk.BufferSizes(4, 64, 8, 32, torch.float32),
        "forwards": {}, "sample_batch": print, **facts})

ready = make(name="ready")
class space:
    nested = make(name="nested")
def factory():
    return make(name="made")
def factory_for(device):
    return make(name=f"made for {device}")
def factory_for_keyword(*, seed=1, device="nowhere"):
    return make(name=f"made for {device}")
partial = functools.partial(make, name="partial")
class Callable:
    def __call__(self, device):
        return make(name=f"called for {device}")
instance = Callable()

number = 5
def makes_text():
    return "no target"
def needs_more(path):
    return make()
def fails():
    raise ValueError("first line.\\nsecond line")
def fails_silently():
    raise ValueError
def fails_of_graphkit():
    raise gk.DeviceError("no CUDA device.")
def exits():
    raise SystemExit(5)
class Trap(type):
    @property
    def text(cls):
        raise AttributeError("first\\nsecond")
    @property
    def broken(cls):
        raise ImportError("first\\nsecond")
class trap(metaclass=Trap):
    pass
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Return ``module(source)``, which writes a module into the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    known = set(sys.modules)

    def write(source=SOURCE):
        name = next(names)
        (tmp_path / f"{name}.py").write_text(source)
        importlib.invalidate_caches()
        return name

    yield write
    for name in set(sys.modules) - known:
        if name.startswith("graphkit_tests_target_"):
            del sys.modules[name]


def refused(text):
    with pytest.raises(TargetError) as caught:
        locate(text, "cpu")
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"TARGET {text!r} ")
    assert str(caught.value).endswith(".")
    assert not str(caught.value).endswith("..")
    return str(caught.value)


@pytest.mark.parametrize(
    ("attribute", "name"),
    [
        ("ready", "ready"),
        ("space.nested", "nested"),
        ("factory", "made"),
        ("factory_for", "made for cuda:1"),
        ("factory_for_keyword", "made for cuda:1"),
        ("partial", "partial"),
        ("instance", "called for cuda:1"),
    ],
)
def test_a_target_or_a_factory_in_the_working_directory_is_found(module, attribute, name):
    found = locate(f"{module()}:{attribute}", "cuda:1")
    assert isinstance(found, CaptureTarget)
    assert found.name == name


def test_a_module_inside_a_package_is_found(module, tmp_path):
    package = tmp_path / next(names)
    package.mkdir()
    (package / "inner.py").write_text(SOURCE)
    assert locate(f"{package.name}.inner:ready", "cpu").name == "ready"


def test_the_path_is_not_lengthened_twice(module):
    locate(f"{module()}:ready", "cpu")
    length = len(sys.path)
    locate(f"{module()}:ready", "cpu")
    assert len(sys.path) == length


@pytest.mark.parametrize("text", ["", ":", "module", "module:", ":attribute", "a.b.c"])
def test_a_text_of_another_form_is_refused(text):
    assert refused(text).endswith("does not have the form package.module:attribute.")


@pytest.mark.parametrize("text", ["models", "models/", ".", "/"])
def test_a_folder_is_refused_as_a_folder(module, tmp_path, text):
    module()
    (tmp_path / "models").mkdir()
    assert refused(text) == (
        f"TARGET {text!r} is a folder. Load a model with --checkpoint, or name a target in a "
        "module that can be imported from the working directory: package.module:attribute."
    )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("no_such_module_here:x", "cannot be imported: ModuleNotFoundError: No module named"),
        (".relative:x", "cannot be imported: TypeError"),
        ("two words:x", "cannot be imported: ModuleNotFoundError"),
        ("os:no_such_name", "not found: module 'os' has no attribute 'no_such_name'"),
        ("os:path..join", "not found"),
        ("os:path", "is a module. Name a graphkit.CaptureTarget"),
        ("os:getcwd", "returned a str, not a graphkit.CaptureTarget"),
        ("builtins:dict", "returned a dict, not a graphkit.CaptureTarget"),
        ("builtins:int", "returned a int, not a graphkit.CaptureTarget"),
    ],
)
def test_an_object_that_is_no_target_is_refused(text, reason):
    assert reason in refused(text)


@pytest.mark.parametrize(
    ("attribute", "reason"),
    [
        ("number", "is a int. Name a graphkit.CaptureTarget"),
        ("makes_text", "returned a str, not a graphkit.CaptureTarget"),
        ("needs_more", "failed when called: TypeError: needs_more() missing 1 required"),
        ("fails", "failed when called: ValueError: first line"),
        ("fails_silently", "failed when called: ValueError"),
        ("exits", "failed when called: SystemExit: 5"),
        ("trap.text", "not found: first"),
        ("trap.broken", "ImportError: first"),
    ],
)
def test_a_factory_or_attribute_that_fails_is_refused(module, attribute, reason):
    assert reason in refused(f"{module()}:{attribute}")


def test_an_error_of_graphkit_passes_through_a_factory(module):
    with pytest.raises(DeviceError, match="no CUDA device"):
        locate(f"{module()}:fails_of_graphkit", "cpu")


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("1 / 0", "cannot be imported: ZeroDivisionError: division by zero"),
        ("import no_such_module_here", "ModuleNotFoundError: No module named"),
        ("def f(:", "cannot be imported: SyntaxError"),
        ("raise RuntimeError('first.\\nsecond')", "cannot be imported: RuntimeError: first"),
        ("raise SystemExit(5)", "cannot be imported: SystemExit: 5"),
    ],
)
def test_a_module_that_fails_is_refused(module, source, reason):
    name = module(source)
    assert reason in refused(f"{name}:x")
    assert name not in sys.modules
