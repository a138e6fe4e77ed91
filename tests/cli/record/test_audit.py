"""``graphkit record --audit`` audits a program in processes of its own, on a stand-in device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import stand_in_device
from audited_runs import import_path
from graphkit.records import AuditReport

pytestmark = pytest.mark.slow

HEAD = f"""
import os, sys
sys.path.append({str(Path(stand_in_device.__file__).parent)!r})
import torch
from stand_in_device import StandInDevice
import graphkit as gk
from graphkit.audit.foreign import following, hooks
from graphkit.audit.foreign.process_files import AuditFileWriter
from graphkit.audit.foreign.audit_options import AuditOptions
from graphkit.audit.foreign.audits.program_audit import ProgramAudit

device = StandInDevice()
Graph = device.graph_class()
options = AuditOptions.from_environment()
if options is not None:
    writer = AuditFileWriter.from_environment(options.report)
    audit = ProgramAudit(options, writer, lambda: device)
    following.begin(audit)
    hooks.observe_captures(Graph, audit.new_capture)
    hooks.observe_replays(Graph, lambda: audit)

def gather(out, table, rows):
    out.copy_(table[rows])

table, rows = device.full(8, value=2), device.full(4, value=0, dtype=torch.int64)
graph = Graph()
graph.capture_begin()  # captures
out = device.empty(4)
device.launch("gather", gather, out, table, rows, source="program.py:1 in lookup")
graph.capture_end()

def replay(row):
    rows.fill_(row)
    graph.replay()
    print(out.tolist())

"""
AUDITS = {"pointers", "frozen", "pool-poison", "launch"}
SOUND = "for row in range(4): replay(row)\n"
FREED = "replay(1)\nrows_kept, table = rows, None\nreplay(2)\n"
FREED_ASKED = "replay(1)\ntable = None\nprint(gk.audit_graphs().findings[0].kind)\n"
FAULT = "replay(1)\nreplay(2)\nreplay(800)\ndevice.synchronize()\n"
SLEEP = """
replay(1)
before = gk.graph_digest()
print(gk.compare_digest(before))
table.zero_()
print([each.severity for each in gk.compare_digest(before)])
"""
CHILDREN = """
import multiprocessing

def work(kind):
    second, own = Graph(), device.full(8, value=3)
    second.capture_begin()
    device.launch("gather", gather, out, own, rows, source="program.py:2 in work")
    second.capture_end()
    del own
    second.replay()

if __name__ == "__main__":
    replay(1)
    for method in ("fork", "spawn"):
        child = multiprocessing.get_context(method).Process(target=work, args=[method])
        child.start()
        child.join()
        assert child.exitcode == 0
"""


@pytest.fixture
def run(tmp_path):
    """Return ``run(body, *options)``: the plain run or, with options, the audited one."""
    environment = {**os.environ, "PYTHONPATH": import_path()}

    def python(body, *options, **variables):
        (tmp_path / "program.py").write_text(HEAD + body)
        command = [sys.executable]
        if options:
            command += ["-m", "graphkit", "record", "--audit", "--out", "r.json", *options[1:]]
        return subprocess.run(
            [*command, "program.py"], cwd=tmp_path, env={**environment, **variables},
            capture_output=True, text=True, check=False,
        )  # fmt: skip

    return python


@pytest.fixture
def report(tmp_path):
    return lambda: AuditReport.load(tmp_path / "r.json")


def test_a_sound_program_prints_the_same_and_has_no_finding(run, report):
    plain = run(SOUND)
    assert plain.returncode == 0, plain.stderr
    done = run(SOUND, "audited", "--every", "1", "--fail-on", "note")
    assert (done.returncode, done.stdout) == (0, plain.stdout), done.stderr
    assert done.stderr.endswith("4 checks, no finding.\nwrote r.json\n")
    assert {check.audit for check in report().checks} == {
        "pointers",
        "frozen",
        "pool-poison",
        "launch",
    }


def test_a_freed_tensor_fails_the_command_on_request(run, report):
    done = run(FREED, "audited", "--fail-on", "error", "--json")
    assert done.returncode == 1
    found = report().findings[0]
    assert (found.kind, found.severity) == ("freed memory", "error")
    line = (HEAD + FREED).splitlines().index("graph.capture_begin()  # captures") + 1
    assert found.mode.endswith(f"program.py:{line} in <module>")
    text = done.stdout[done.stdout.index("{") :]
    assert json.loads(text) == json.loads(report().to_json())


def test_a_fault_is_searched_in_a_second_run(run, report):
    done = run(FAULT, "audited", "--find-fault")
    assert done.returncode == 1
    found = report().findings[0]
    assert (found.audit, found.kernel) == ("fault", "gather")
    assert found.source == "program.py:1 in lookup"
    assert "replay 3" in found.text
    assert done.stdout.count("[2.0, 2.0, 2.0, 2.0]") >= 4, "the program ran twice"


def test_a_program_asks_for_digests_and_an_audit(run):
    done = run(SLEEP + FREED_ASKED, "audited")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1:3] == ["()", "['note']"]
    assert done.stdout.endswith("freed memory\n")
    assert "error: freed memory: " in done.stderr


def test_the_variable_alone_audits_a_program(run, report, tmp_path):
    assert run(FREED, GRAPHKIT_AUDIT="r.json").returncode == 0
    assert report().findings
    done = run(SOUND, GRAPHKIT_AUDIT="r.json", GRAPHKIT_AUDIT_EVERY="2")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "[2.0, 2.0, 2.0, 2.0]\n" * 4
    assert {check.audit for check in report().checks} == {
        "pointers",
        "frozen",
        "pool-poison",
        "launch",
    }
    assert report().findings == (), "a later run replaces the report"
    assert len(list((tmp_path / "r.json.processes").glob("*.json"))) == 1


def test_the_report_has_what_child_processes_found(run, report, tmp_path):
    done = run(CHILDREN, GRAPHKIT_AUDIT="r.json")
    assert done.returncode == 0, done.stderr
    (found,) = report().findings
    assert found.kind == "freed memory"
    assert len(found.modes) == 2, "one graph of each child"
    assert all(mode.startswith("process ") for mode in found.modes)
    assert report().target.endswith(" program.py")
    own = [AuditReport.load(path) for path in (tmp_path / "r.json.processes").glob("*.json")]
    assert sorted(len(each.findings) for each in own) == [0, 1, 1]
    checks = [check for each in own for check in each.checks if check.audit == "pool-poison"]
    assert len(checks) == 3, "the end of a forked process writes what it checked last"
    assert len(report().checks) == sum(len(each.checks) for each in own)
