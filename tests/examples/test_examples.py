"""Every example runs, and so do the code and the commands of the README."""

import re
import runpy
import shlex
from pathlib import Path

import pytest

from graphkit.records import BenchReport

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "tools" / "examples").glob("*.py"))
ENDLESS = {"serve"}
"""It serves until it is stopped; see test_serve.py."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "path", [path for path in EXAMPLES if path.stem not in ENDLESS], ids=lambda path: path.stem
)
def test_an_example_runs(path, capsys):
    if path.stem == "structured_output":
        pytest.importorskip("xgrammar")
    assert runpy.run_path(str(path))["main"]() == 0
    printed = capsys.readouterr().out
    assert printed
    if path.stem == "verify_chain":  # chains are accepted up to their first wrong token
        accepted = re.findall(r"accepted (\[.*\])", printed)
        assert accepted == ["[0, 1, 2]", "[0, 1, 2, 3, 0, 1, 2, 3]", "[0]"]


def test_verify_chain_is_an_example():
    assert "verify_chain" in {path.stem for path in EXAMPLES}


@pytest.mark.slow
@pytest.mark.parametrize("command", ["capture", "audit"])
def test_the_command_accepts_the_own_target_example(command, monkeypatch, capsys):
    """It has no finding but its constants, because users start from it."""
    from graphkit.cli import main

    monkeypatch.chdir(ROOT)
    arguments = [
        command,
        "tools.examples.own_target:target",
        "--device",
        "cpu",
        "--batch-sizes",
        "4",
    ]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert re.search(r"own model\ndevice +cpu\n", printed)
    assert {"capture": "36 live batches replayed: each", "audit": ": 1 note."}[command] in (
        " ".join(printed.split())
    )


@pytest.mark.slow
def test_the_command_audits_recurrent_layers_without_an_error(monkeypatch, capsys):
    from graphkit.cli import main

    monkeypatch.chdir(ROOT)
    assert main(["audit", "tools.examples.mamba:target", "--device", "cpu"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "Mamba device cpu" in printed
    assert printed.endswith("checks: 1 note.")
    assert "architecture constants" in printed


def test_the_first_example_of_the_readme_prints_what_it_shows(capsys):
    readme = (ROOT / "README.md").read_text()
    code, shown = re.search(r"```python\n(.*?)```\n\n```text\n(.*?)```", readme, re.DOTALL).groups()
    exec(compile(code, "README.md", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out == shown


def test_the_readme_is_short_and_installs_the_torch_of_the_constraints():
    readme = (ROOT / "README.md").read_text()
    assert len(readme.splitlines()) <= 110
    (version,) = re.findall(r"^torch==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    index = "--index-url https://download.pytorch.org/whl/cpu"
    assert f"pip install torch=={version} {index}" in readme
    assert index in (ROOT / "Makefile").read_text()


def test_the_readme_names_existing_make_targets():
    makefile = (ROOT / "Makefile").read_text()
    for name in re.findall(r"^    make (\w+)", (ROOT / "README.md").read_text(), re.MULTILINE):
        assert re.search(rf"^{name}:", makefile, re.MULTILINE), name


COMMANDS = re.findall(
    r"^    \.venv/bin/graphkit ([^#\n]+)", (ROOT / "README.md").read_text(), re.MULTILINE
)


@pytest.mark.slow
@pytest.mark.parametrize("line", COMMANDS, ids=lambda line: line.split()[0])
def test_the_commands_of_the_readme_run(line, monkeypatch, capsys, tmp_path):
    from graphkit.cli import main

    monkeypatch.chdir(ROOT)
    arguments = shlex.split(line)
    if arguments[0] == "bench":  # as printed, it takes 20 seconds
        arguments += shlex.split("--steps-per-launch 1 --steps 1 --rounds 1")
    if "--out" in arguments:
        arguments[-1] = str(tmp_path / arguments[-1])
    assert main(arguments) == 0
    assert "Traceback" not in capsys.readouterr().err


def test_the_readme_shows_the_commands():
    shown = {line.split()[0] for line in COMMANDS}
    assert shown == {
        "generate", "capture", "inspect", "export", "diff", "audit", "bench", "record",
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("factory", ["dense", "moe"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_model_that_declares_nothing_has_no_error_and_few_findings(factory, device):
    from graphkit.audit import audit_target

    path = ROOT / "tools" / "examples" / "minimal_target.py"
    target = runpy.run_path(str(path))[factory](device)
    report = audit_target(target, batch_sizes=[4], device=device)
    findings = [each for each in report.findings if each.audit != "launch"]  # of other tests, too
    assert "error" not in {each.severity for each in findings}
    assert len(findings) <= 5
    (memory,) = (each for each in findings if each.kind == "undeclared memory")
    assert "forward.model.model.embed_tokens.weight" in memory.names


STEPS = {
    "v1: the host waits for each step": "v1: time per step",
    "v2: the host is one step behind": "v2: time per step",
    "v3: 64 steps in one launch": "loop of 64: time per step",
    "v2, with two busy processes per core": "v2, loaded: time per step",
    "v3, with them": "loop of 64, loaded: time per step",
}
SETTINGS = ("chain, 1", "tree of topk 4, 1", "chain, 8", "tree of topk 4, 8")


def measured(result):
    """Return the measures of a committed result by name and setting."""
    text = (ROOT / "tools" / "bench" / "results" / f"{result}.json").read_text()
    return {
        ", ".join(filter(None, [each.setting, each.variant, each.name])): each.value
        for each in BenchReport.from_json(text).measures
    }


def test_the_readme_states_the_committed_times_of_steps():
    readme, found = " ".join((ROOT / "README.md").read_text().split()), measured("step")
    for title, name in STEPS.items():
        cells = " | ".join(f"{found[f'{setting}, {name}']:.2f}" for setting in SETTINGS)
        assert f"| {title} | {cells} |" in readme
    assert f"One request gets {found['chain, 1, loop of 64: tokens']:,.0f} tokens/s." in readme
    others = found["one request, transformers, static cache, compiled: tokens"]
    assert f"and with a compiled step, gets {others:,.0f} tokens/s." in readme
