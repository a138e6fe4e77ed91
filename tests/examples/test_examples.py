"""Every example runs, and so does the README."""

import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from graphkit.records import BenchReport

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "tools" / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs(path, capsys):
    assert runpy.run_path(str(path))["main"]() == 0
    assert capsys.readouterr().out


def test_chains_are_accepted_up_to_their_wrong_token(capsys):
    runpy.run_path(str(ROOT / "tools" / "examples" / "verify_chain.py"))["main"]()
    accepted = re.findall(r"accepted (\[.*\])", capsys.readouterr().out)
    assert accepted == ["[0, 1, 2]", "[0, 1, 2, 3, 0, 1, 2, 3]", "[0]"]


@pytest.mark.parametrize("command", ["capture", "audit"])
def test_the_own_target_is_a_target_for_the_command(command, monkeypatch, capsys):
    """The audit's warnings, too, would be those of everyone who starts from it."""
    from graphkit.cli import main

    monkeypatch.chdir(ROOT)
    words = [command, "tools.examples.own_target:target", "--device", "cpu", "--batch-sizes", "4"]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "own model on cpu" in said
    assert {"capture": "36 live batches replayed: each", "audit": "no finding."}[command] in (
        " ".join(said.split())
    )


def test_the_readme_runs_as_it_stands():
    code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL).group(1)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("tensor([")


def test_the_readme_names_targets_that_exist():
    makefile = (ROOT / "Makefile").read_text()
    for name in re.findall(r"^    make (\w+)", (ROOT / "README.md").read_text(), re.MULTILINE):
        assert re.search(rf"^{name}:", makefile, re.MULTILINE), name


COMMANDS = re.findall(
    r"^    \.venv/bin/graphkit ([^#\n]+)", (ROOT / "README.md").read_text(), re.MULTILINE
)


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words.split()[0])
def test_the_readmes_commands_run_as_they_stand(words, monkeypatch, capsys, tmp_path):
    from graphkit.cli import main

    monkeypatch.chdir(ROOT)
    arguments = shlex.split(words)
    if "--out" in arguments:
        arguments[-1] = str(tmp_path / arguments[-1])
    assert main(arguments) == 0
    assert "Traceback" not in capsys.readouterr().err


def test_the_readme_shows_every_command_to_look_inside_and_to_trust():
    shown = {words.split()[0] for words in COMMANDS}
    assert shown == {"generate", "inspect", "export", "diff", "record", "audit"}


def measured_section():
    return (ROOT / "README.md").read_text().partition("## Measured")[2].partition("## ")[0]


@pytest.mark.parametrize(
    ("result", "name"),
    [
        ("sight", "walk, per 200 nodes"),
        ("sight", "inspect: walk, names, record"),
        ("sight", "attribution, per node"),
        ("audits", "all audits"),
        ("audits", "pointers"),
        ("audits", "host: replay"),
        ("audits", "host: replay under a watch"),
    ],
)
def test_the_readmes_figures_of_sight_and_trust_are_the_committed_ones(result, name):
    text = (ROOT / "tools" / "bench" / "results" / f"{result}.json").read_text()
    report = BenchReport.from_json(text)
    (figure,) = (measure for measure in report.measures if measure.name == name)
    assert f"{figure.value:.2f} {figure.unit}" in measured_section()


def test_the_readmes_figures_are_those_of_the_committed_result():
    text = (ROOT / "tools" / "bench" / "results" / "refresh.json").read_text()
    report = BenchReport.from_json(text)
    measured = {f"{measure.value:.2f}" for measure in report.measures}
    readme = measured_section()
    table = re.findall(r"\| (\d+\.\d+) \|", readme)
    assert len(table) == 9
    assert set(table) <= measured
    for fact in (report.environment.driver, report.environment.torch, report.environment.triton):
        assert fact in readme


@pytest.mark.parametrize("factory", ["llama", "qwen3"])
def test_a_transformers_model_has_no_finding(factory, monkeypatch):
    """A model that this project did not write, in a wrapper of some thirty lines."""
    from graphkit.audit import audit_target
    from graphkit.testing import assert_target_equivalent

    monkeypatch.chdir(ROOT)
    path = ROOT / "tools" / "examples" / "transformers_models.py"
    target = runpy.run_path(str(path))[factory]()
    assert_target_equivalent(target, batch_sizes=[2, 8], device="cpu")
    assert not audit_target(target, batch_sizes=[2, 8], device="cpu").findings
