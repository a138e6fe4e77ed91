"""``graphkit record --audit`` finds planted faults, and leaves the output of sound programs alone.

Each program runs in processes of its own, because a fault ends the CUDA context.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import graphkit
from graphkit.graphs.driver import runtime
from graphkit.records import AuditReport

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(runtime() is None, reason="needs cuda-bindings"),
]

HEAD = """
import torch
from torch import nn

torch.manual_seed(0)

class Engine:
    def __init__(self):
        self.model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256)).cuda()
        self.x = torch.randn(8, 256, device="cuda")
        self.graph = torch.cuda.CUDAGraph()

    def capture(self, step):
        side = torch.cuda.Stream()
        with torch.cuda.stream(side), torch.no_grad():
            step()
        torch.cuda.synchronize()
        with torch.no_grad(), torch.cuda.graph(self.graph):
            self.y = step()

    def replay(self, times=5):
        for number in range(times):
            self.x.fill_(number + 1)
            self.graph.replay()
            print(self.y.double().sum().item(), self.y.flatten()[:4].tolist())

engine = Engine()
"""

SOUND = """
engine.capture(lambda: engine.model(engine.x))
engine.replay()
"""

ACCUMULATES = """
total = torch.zeros(8, 256, device="cuda")
noise = torch.empty(8, 256, device="cuda")

def step():
    noise.normal_()
    total.add_(engine.model(engine.x) + noise)
    return total * 1

engine.capture(step)
engine.replay()
print(total.double().sum().item(), torch.rand(3, device="cuda").tolist())
"""

FREED = """
scale = torch.full((8, 256), 2.0, device="cuda")
engine.capture(lambda: engine.model(engine.x) * scale)  # multiplies
del scale
engine.graph.replay()
torch.cuda.synchronize()
"""

REPLACED = """
engine.capture(lambda: engine.model(engine.x))
engine.x = torch.ones(8, 256, device="cuda")
engine.graph.replay()
torch.cuda.synchronize()
"""

STALE = """
def step():
    last = torch.empty(8, 256, device="cuda")  # never filled
    out = engine.model(engine.x) + last
    last.copy_(out)
    return out

engine.capture(step)
engine.graph.replay()
torch.cuda.synchronize()
"""

INDEX = """
table = torch.randn(16, 256, device="cuda")
rows = torch.zeros(8, dtype=torch.int64, device="cuda")
engine.capture(lambda: engine.model(engine.x) + table.index_select(0, rows))  # selects
for row in (1, 2, 1_000_000_000):
    rows.fill_(row)
    engine.graph.replay()
torch.cuda.synchronize()
"""

SLEEP = """
import graphkit as gk

engine.capture(lambda: engine.model(engine.x))
engine.graph.replay()
before = gk.fingerprint()
assert gk.compare_fingerprint(before) == ()
engine.model[2].weight.data.zero_()
for each in gk.compare_fingerprint(before):
    print(each.severity, each.kind, each.name)
"""

COMPILED = """
model = torch.compile(engine.model, mode="reduce-overhead")
with torch.no_grad():
    for number in range(6):
        engine.x.fill_(number + 1)
        print(model(engine.x).double().sum().item())
"""


class Runs:
    """Runs one program plainly and audited."""

    def __init__(self, folder):
        self.folder = folder
        self.environment = {**os.environ, "PYTHONPATH": str(Path(graphkit.__file__).parents[1])}

    def write(self, body):
        self.text = HEAD + body
        (self.folder / "program.py").write_text(self.text)

    def python(self, *arguments):
        return subprocess.run(
            [sys.executable, *arguments], cwd=self.folder, env=self.environment,
            capture_output=True, text=True, check=False,
        )  # fmt: skip

    def audit(self, *options):
        done = self.python(
            "-m", "graphkit", "record", "--audit", "--out", "r.json", *options, "program.py"
        )
        assert (self.folder / "r.json").exists(), done.stderr
        assert "is incomplete" not in done.stderr
        return done, AuditReport.load(self.folder / "r.json")

    def line(self, mark):
        lines = self.text.splitlines()
        return next(number for number, line in enumerate(lines, 1) if mark in line)


@pytest.fixture
def runs(tmp_path):
    return Runs(tmp_path)


def shown(report):
    """Return the checks and findings as text, for the message of an assertion."""
    return "\n".join(map(str, (*report.findings, *report.checks)))


def assert_sound(runs, body, *options):
    """Run a program with and without the audit; return the audited run's report."""
    runs.write(body)
    plain = runs.python("program.py")
    assert plain.returncode == 0, plain.stderr
    done, report = runs.audit(*options)
    assert (done.returncode, done.stdout) == (0, plain.stdout), done.stderr + shown(report)
    assert not [each for each in report.findings if each.severity == "error"], shown(report)
    return report


def poisoned(report):
    return [each for each in report.checks if each.audit == "pool-poison"]


def first_finding(runs, body, *options):
    runs.write(body)
    done, report = runs.audit(*options)
    assert report.findings, done.stderr + shown(report)
    return done, report, report.findings[0]


@pytest.mark.parametrize("options", [(), ("--every", "2")], ids=["first", "every second"])
@pytest.mark.parametrize("body", [SOUND, ACCUMULATES], ids=["layers", "state and noise"])
def test_a_sound_program_has_the_same_output_and_no_error(runs, body, options):
    report = assert_sound(runs, body, *options)
    (check,) = poisoned(report)
    assert check.text.startswith("overwrote"), shown(report)
    assert "program.py" in check.mode


@pytest.mark.slow
def test_a_compiled_model_has_the_same_output_and_no_error(runs):
    report = assert_sound(runs, COMPILED)
    assert [check for check in poisoned(report) if check.text.startswith("overwrote")], shown(
        report
    )


def test_a_freed_input_is_found(runs):
    _, report, found = first_finding(runs, FREED)
    assert (found.kind, found.severity) == ("freed memory", "error"), shown(report)
    assert f"program.py:{runs.line('torch.cuda.graph(')} in capture" in found.mode
    assert f"program.py:{runs.line('# multiplies')}" in found.source


def test_a_replaced_static_tensor_is_found(runs):
    _, report, found = first_finding(runs, REPLACED)
    assert (found.kind, found.severity) == ("replaced static tensor", "error"), shown(report)
    assert "Engine.x" in found.names
    assert f"program.py:{runs.line('torch.cuda.graph(')} in capture" in found.mode


def test_a_stale_read_of_the_pool_is_found(runs):
    _, report, found = first_finding(runs, STALE)
    assert (found.kind, found.severity) == ("stale pool memory", "error"), shown(report)
    assert f"program.py:{runs.line('# never filled')} in step" in found.text, shown(report)


def test_a_fault_is_found_in_its_replay_and_node(runs):
    done, report, found = first_finding(runs, INDEX, "--find-fault")
    assert done.returncode
    assert (found.audit, found.severity) == ("fault", "error"), shown(report)
    assert "replay 3" in found.text, shown(report)
    assert f"program.py:{runs.line('# selects')}" in found.source, shown(report)


def test_a_weight_zeroed_in_sleep_is_found(runs):
    runs.write(SLEEP)
    done, report = runs.audit()
    assert done.stdout.startswith("error weight Sequential.2.weight\n"), done.stdout + done.stderr
    assert report.findings[0].kind == "weight differs", shown(report)
