"""Top-level folders, links and package list agree, and nothing but ``graphkit`` is installed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
SETUPTOOLS = PYPROJECT["tool"]["setuptools"]
ROOMS = ("buffers", "runners")
"""Top-level folders that import as part of graphkit."""


def folders_of(suffix):
    """Folders under graphkit/ that hold a file of that name, links followed, as package names."""
    found = set()
    for folder, subfolders, files in os.walk(ROOT / "graphkit", followlinks=True):
        subfolders[:] = [name for name in subfolders if name != "__pycache__"]
        if any(file.endswith(suffix) for file in files):
            found.add(".".join(Path(folder).relative_to(ROOT).parts))
    return found


def test_the_package_list_is_what_is_on_disk():
    assert set(SETUPTOOLS["packages"]) == folders_of("__init__.py")


def test_no_folder_with_code_lacks_an_init():
    assert folders_of(".py") == folders_of("__init__.py")


def test_the_package_list_is_sorted_and_without_twins():
    packages = SETUPTOOLS["packages"]
    assert packages == sorted(set(packages))


def test_everything_installed_is_inside_graphkit():
    assert {name.split(".")[0] for name in SETUPTOOLS["packages"]} == {"graphkit"}
    assert set(SETUPTOOLS) <= {"packages", "package-dir", "package-data", "dynamic"}


def test_the_mapping_names_the_top_level_folders():
    assert SETUPTOOLS["package-dir"] == {f"graphkit.{room}": room for room in ROOMS}


@pytest.mark.parametrize("room", ROOMS)
def test_the_link_in_graphkit_is_relative_and_leads_to_the_top(room):
    link = ROOT / "graphkit" / room
    assert link.is_symlink()
    assert os.readlink(link) == f"../{room}"  # noqa: PTH115 - the text of the link, not its end
    assert (ROOT / room).is_dir()
    assert not (ROOT / room).is_symlink()


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git checkout")
def test_git_holds_the_links_as_links():
    paths = [f"graphkit/{room}" for room in ROOMS]
    listing = subprocess.run(
        ["git", "ls-files", "--stage", *paths], cwd=ROOT, capture_output=True, text=True, check=True
    )
    entries = [line.split() for line in listing.stdout.splitlines()]
    assert {(entry[3], entry[0]) for entry in entries} == {(path, "120000") for path in paths}


def test_the_version_can_be_read_without_importing():
    """setuptools reads the attribute from the syntax tree only if it is a plain text."""
    assert SETUPTOOLS["dynamic"]["version"] == {"attr": "graphkit.version.__version__"}
    declared = (ROOT / "graphkit" / "version.py").read_text(encoding="utf-8")
    (version,) = re.findall(r'^__version__ = "(\d+\.\d+\.\d+[^"]*)"$', declared, re.MULTILINE)
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")


def test_the_command_points_at_main():
    from graphkit.cli import main

    assert PYPROJECT["project"]["scripts"] == {"graphkit": "graphkit.cli:main"}
    assert callable(main)


def test_the_tested_versions_are_within_the_bounds_and_next_to_the_upper_ones():
    project = PYPROJECT["project"]
    extras = (project["optional-dependencies"][name] for name in ("cuda", "models", "metrics"))
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    tested = {canonicalize_name(name): version for name, version in (p.split("==") for p in pins)}
    for requirement in map(Requirement, [*project["dependencies"], *chain(*extras)]):
        version = Version(tested[canonicalize_name(requirement.name)])
        assert version in requirement.specifier, requirement
        (bound,) = (Version(s.version) for s in requirement.specifier if s.operator == "<")
        after = [*version.release[: len(bound.release)]]
        after[-1] += 1
        if requirement.name == "transformers":  # `make versions` runs a newer one
            after[-1] += 1
        assert [*bound.release] == after, requirement


@pytest.mark.slow
@pytest.mark.parametrize("links", [True, False], ids=["links", "links lost"])
def test_a_wheel_holds_all_of_graphkit_and_nothing_else(tmp_path, links):
    """Also where the links became plain files, as on a file system without them."""
    source = tmp_path / "source"
    source.mkdir()
    for name in ("graphkit", *ROOMS):
        shutil.copytree(
            ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__")
        )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    if not links:
        for room in ROOMS:
            (source / "graphkit" / room).unlink()
            (source / "graphkit" / room).write_text(f"../{room}")
    build_wheel(source, tmp_path / "out")
    (wheel,) = (tmp_path / "out").glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    top = {name.split("/")[0] for name in names}
    assert top == {"graphkit", f"{'-'.join(wheel.name.split('-')[:2])}.dist-info"}
    assert expected_files() <= names


def build_wheel(source, out):
    """What pip does without isolation, run by setuptools itself so that no network is touched."""
    build = f"import setuptools.build_meta as b; b.build_wheel({str(out)!r})"
    out.mkdir()
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", build],
        cwd=source, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]


def expected_files():
    """Every module, marker, page and weight on disk, by its place in a wheel."""
    return {
        Path(folder).relative_to(ROOT).joinpath(file).as_posix()
        for folder, _, files in os.walk(ROOT / "graphkit", followlinks=True)
        for file in files
        if file.endswith((".py", ".pyi", "py.typed"))
        or {"weights", "web"} & set(Path(folder).parts)
    }
