"""``graphkit record --audit`` over programs of transformers and ``torch.compile``.

Sound programs print the same with and without the audit and have no error. Copies of continuous
batching with a planted fault report it first, with its line. All programs run at the same time, in
processes of their own, because most of their time is spent on imports and compilation.
"""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from audited_runs import Program
from foreign_programs import FAULTS, SOUND, batching
from graphkit.graphs.driver import runtime

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(runtime() is None, reason="needs cuda-bindings"),
]
WORKERS = 6
"""Programs at a time: each takes a core and about 1 GiB of device memory."""
FOUND = {
    "freed input": ("freed memory", "# multiplies"),
    "replaced buffer": ("replaced buffer", "# multiplies"),
    "stale pool read": ("stale pool memory", "# never filled"),
    "frozen temperature": ("frozen value", "# divides"),
    "dropped pool": ("freed memory", "# multiplies"),
    "weight zeroed in sleep": ("weight differs", ""),
    "index out of range": ("fault", "# selects"),
}
"""Kind of the first finding, and a mark in its line."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Start all programs; return the plain and the audited run of a program, as futures."""
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("programs")
    with ThreadPoolExecutor(WORKERS) as workers:
        started = {}
        for name, text in SOUND.items():
            program = Program(folder / name.replace(" ", "-"), text)
            started[name] = program, workers.submit(program.run), workers.submit(program.audit)
        for name in FAULTS:
            program = Program(folder / name.replace(" ", "-"), batching(name))
            options = ["--find-fault"] if FOUND[name][0] == "fault" else ["--every", "4"]
            started[name] = program, None, workers.submit(program.audit, *options)
        yield started


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_program_prints_the_same_and_has_no_error(runs, name):
    _, plain, audited = runs[name]
    plain, audited = plain.result(), audited.result()
    assert plain.returncode == 0, plain.stderr
    assert plain.stdout.strip(), plain.stderr
    assert (audited.done.returncode, audited.done.stdout) == (0, plain.stdout), str(audited)
    assert not [each for each in audited.report.findings if each.severity == "error"], str(audited)
    checks = [each for each in audited.report.checks if each.audit == "pool-poison"]
    assert [each for each in checks if each.text.startswith("overwrote")], str(audited)


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found_first_with_its_line(runs, name):
    program, _, audited = runs[name]
    audited = audited.result()
    kind, mark = FOUND[name]
    assert re.search(r"planted: True [1-9]\d* of ", audited.done.stdout), str(audited)
    assert audited.report.findings, str(audited)
    found = audited.report.findings[0]
    assert (found.kind, found.severity) == (kind, "error"), str(audited)
    if mark:
        line = f"program.py:{program.line(mark)} in "
        assert line in found.source or line in found.text, str(audited)
    else:
        assert "LlamaForCausalLM.lm_head.weight" in found.names, str(audited)
        assert "`" in found.text, str(audited)
        assert " at " in found.text, str(audited)
