"""Build the sdist and the wheel of HEAD, install them in clean environments, and use them there.

``make package-check`` runs it. The wheel is built twice, from the repository and from the sdist,
and both must have the same files. There is an environment for each Python of the classifiers that
is installed; the others are named. Packages come from where ``make`` takes them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EXTRAS = "models,metrics,testing"
BUILD = "import sys; from setuptools import build_meta; build_meta.build_{}(sys.argv[1])"
IMPORT_ALL = """
import importlib, pathlib, pkgutil, graphkit
assert "site-packages" in graphkit.__file__, graphkit.__file__
found = pkgutil.walk_packages(graphkit.__path__, "graphkit.")
names = ["graphkit", *(each.name for each in found if each.ispkg)]
modules = [importlib.import_module(name) for name in names]
public = [(m, name) for m in modules for name in getattr(m, "__all__", ())]
for module, name in public:
    getattr(module, name)
print(f"graphkit {graphkit.__version__}: {len(public)} public names of {len(modules)} packages")
"""
FOLLOWED = "import torch; print(hasattr(torch.cuda.CUDAGraph, '_graphkit_followed'))"
"""Prints whether the audit of foreign graphs has begun, which the entry point for torch does."""
COMMANDS = (
    "--help",
    "doctor",
    "capture --device cpu --mode TARGET_VERIFY --batch-sizes 1,2 --out record.json",
    "inspect record.json --plain",
    "export record.json --out page.html",
    "generate --device cpu --prompt import --algorithm EAGLE3 --max-new-tokens 4",
    "generate --device cpu --prompt import --algorithm STANDALONE --max-new-tokens 4",
)
"""They read the weights of the reference models, and the files of the page."""


def run(*command: str | Path, folder: Path, **variables: str) -> str:
    """Run a command in a folder and return what it prints; raise if it fails."""
    shown = " ".join([Path(command[0]).name, *map(str, command[1:])])
    print("$", shown.partition("\n")[0], flush=True)
    plain = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=folder, env={**plain, **variables}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"exit code {done.returncode} of {shown}\n{done.stdout}{done.stderr}")
    return done.stdout


def built(kind: str, source: Path, out: Path) -> Path:
    """Build an sdist or a wheel of a source folder."""
    out.mkdir()
    run(sys.executable, "-c", BUILD.format(kind), out, folder=source)
    (made,) = out.iterdir()
    return made


def files_of(wheel: Path) -> dict[str, int]:
    """Return the checksum of each file, by name."""
    return {each.filename: each.CRC for each in zipfile.ZipFile(wheel).infolist()}


def main() -> int:
    """Build, install and use the packages."""
    with tempfile.TemporaryDirectory(prefix="graphkit-") as name:
        work = Path(name)
        source = work / "source"
        run("git", "archive", "--output", work / "source.tar", "HEAD", folder=ROOT)
        shutil.unpack_archive(work / "source.tar", source, filter="tar")
        wheel = built("wheel", source, work / "wheel")
        sdist = built("sdist", source, work / "sdist")
        shutil.unpack_archive(sdist, work / "unpacked", filter="tar")
        (unpacked,) = (work / "unpacked").iterdir()
        from_sdist = built("wheel", unpacked, work / "wheel-of-sdist")
        if files_of(wheel) != files_of(from_sdist):
            changed = files_of(wheel).items() ^ files_of(from_sdist).items()
            raise SystemExit(f"the sdist builds another wheel: {sorted(changed)}")

        for version, interpreter in interpreters().items():
            use(from_sdist, interpreter, work / version)
            print(f"{sdist.name} and {wheel.name} work with Python {version}")
    return 0


def interpreters() -> dict[str, str]:
    """Return the installed Pythons of the classifiers by version; print those that are missing."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    prefix = "Programming Language :: Python :: "
    versions = [each.removeprefix(prefix) for each in project["classifiers"] if prefix in each]
    installed = {"{}.{}".format(*sys.version_info): sys.executable}
    for version in (each for each in versions if "." in each and each not in installed):
        command = shutil.which(f"python{version}")
        # A shim of pyenv exists for versions that are not selected, too.
        if command and not subprocess.run([command, "-V"], capture_output=True).returncode:
            installed[version] = command
        else:
            print(f"Python {version} is not installed: not checked")
    return installed


def use(wheel: Path, interpreter: str, folder: Path) -> None:
    """Install a wheel in a new environment of an interpreter, and use it there."""
    empty = folder / "empty"
    empty.mkdir(parents=True)
    run(interpreter, "-m", "venv", folder / "env", folder=empty)
    python = folder / "env" / "bin" / "python"
    pip = (python, "-m", "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt")
    run(*pip, f"{wheel}[{EXTRAS}]", folder=empty)
    print(run(python, "-c", IMPORT_ALL, folder=empty), end="")
    for arguments in COMMANDS:
        run(python.with_name("graphkit"), *arguments.split(), folder=empty)
    for report, begins in (("", "False\n"), (str(folder / "audit.json"), "True\n")):
        if run(python, "-c", FOLLOWED, folder=empty, GRAPHKIT_AUDIT=report) != begins:
            raise SystemExit(f"GRAPHKIT_AUDIT={report!r}: an audit begins must be {begins}")


if __name__ == "__main__":
    raise SystemExit(main())
