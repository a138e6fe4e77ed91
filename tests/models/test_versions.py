"""The versions of transformers that ``graphkit.models`` accepts: `make versions` runs both ends."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from graphkit.errors import ConfigError
from graphkit.models.versions import NEWEST, OLDEST, RECURRENT, check_version, numbered

ROOT = Path(__file__).parents[2]
RANGE = "5.17 to 5.24"


def dotted(version):
    return ".".join(map(str, version))


@pytest.mark.parametrize("version", ["5.0.0", "5.3.0", "5.16.9", "4.57.1", "5", "5.16.0.dev0"])
def test_an_older_version_is_refused_with_the_range(version):
    with pytest.raises(ConfigError, match=rf"is {version}, .* tested with {RANGE}. Install") as got:
        check_version(version)
    assert got.value.field == "transformers"


@pytest.mark.parametrize("version", ["5.17.0", "5.20.1", "5.24.3", "5.24.0.dev0"])
def test_a_tested_version_is_taken_in_silence(version, caplog):
    check_version(version)
    assert not caplog.records


@pytest.mark.parametrize("version", ["5.25.0", "6.0.0", "5.25.0.dev0", "6"])
def test_a_newer_version_is_a_warning(version, caplog):
    with caplog.at_level(logging.WARNING, "graphkit"):
        check_version(version)
    assert f"transformers is {version}, but graphkit.models is tested with {RANGE}" in caplog.text


@pytest.mark.parametrize("version", ["5.0.0", "5.3.0"])
def test_an_old_version_is_refused_before_it_is_imported_from(tmp_path, version):
    (tmp_path / "transformers.py").write_text(f"__version__ = {version!r}\n")
    script = (
        "import graphkit as gk\ntry:\n    gk.models.load\nexcept gk.ConfigError as e:\n    print(e)"
    )
    shown = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{script}"],
        capture_output=True, text=True, check=True, cwd=ROOT,
    ).stdout  # fmt: skip
    assert shown.startswith(
        f"transformers is {version}, but graphkit.models needs {dotted(OLDEST)}"
    )


def test_extra_page_and_targets_name_the_range():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    bound = f"{NEWEST[0]}.{NEWEST[1] + 1}"
    assert f"transformers>={dotted(OLDEST)},<{bound}" in extras["models"]
    page = (ROOT / "docs/compatibility.md").read_text()
    assert f"| transformers | {dotted(OLDEST)} to {dotted(NEWEST)}" in page
    ends = {
        numbered(each)
        for each in re.findall(r"transformers==(\S+)", (ROOT / "Makefile").read_text())
    }
    assert ends == {OLDEST, NEWEST}
    assert "make versions" in (ROOT / ".ci/run").read_text()
    assert dotted(RECURRENT) in page
