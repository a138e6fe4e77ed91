"""``graphkit record --audit`` finds planted faults, and leaves the output of sound programs alone.

Each program runs in processes of its own, because a fault ends the CUDA context.
"""

import pytest

from audited_runs import Program, installed
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
before = gk.graph_digest()
assert gk.compare_digest(before) == ()
engine.model[2].weight.data.zero_()
for each in gk.compare_digest(before):
    print(each.severity, each.kind, *each.names)
"""

PINNED = """
engine.host = torch.ones(8, 256).pin_memory()
buffer = torch.zeros(8, 256, device="cuda")

def step():
    buffer.copy_(engine.host, non_blocking=True)  # copies
    return engine.model(engine.x) + buffer

engine.capture(step)
del engine.host
engine.graph.replay()
torch.cuda.synchronize()
"""

MOVED = """
engine.capture(lambda: engine.model(engine.x))
for _ in range(5):
    engine.graph.replay()
weights = {name: weight.clone() for name, weight in engine.model.state_dict().items()}
engine.model.load_state_dict(weights, assign=True)
engine.graph.replay()
torch.cuda.synchronize()
"""

COMPILED = """
model = torch.compile(engine.model, mode="reduce-overhead")
with torch.no_grad():
    for number in range(6):
        engine.x.fill_(number + 1)
        print(model(engine.x).double().sum().item())
"""


@pytest.fixture
def program(tmp_path):
    """Return ``program(body)``: a program that defines an engine and runs the body."""
    return lambda body: Program(tmp_path, HEAD + body)


def assert_sound(program, *options):
    """Run a program with and without the audit; return the checks for stale pool memory."""
    plain = program.run()
    assert plain.returncode == 0, plain.stderr
    audited = program.audit(*options)
    assert (audited.done.returncode, audited.done.stdout) == (0, plain.stdout), str(audited)
    assert not [each for each in audited.report.findings if each.severity == "error"], str(audited)
    checks = [each for each in audited.report.checks if each.audit == "pool-poison"]
    assert [each for each in checks if each.text.startswith("overwrote")], str(audited)
    return checks


def first_finding(program, *options):
    audited = program.audit(*options)
    assert audited.report.findings, str(audited)
    return audited, audited.report.findings[0]


@pytest.mark.parametrize("options", [(), ("--every", "2")], ids=["first", "every second"])
@pytest.mark.parametrize("body", [SOUND, ACCUMULATES], ids=["layers", "state and noise"])
def test_a_sound_program_has_the_same_output_and_no_error(program, body, options):
    (check,) = assert_sound(program(body), *options)
    assert check.text.startswith("overwrote")
    assert "program.py" in check.mode


@pytest.mark.slow
def test_a_compiled_model_has_the_same_output_and_no_error(program):
    assert_sound(program(COMPILED))


def test_a_freed_input_is_found(program):
    program = program(FREED)
    audited, found = first_finding(program)
    assert (found.kind, found.severity) == ("freed memory", "error"), str(audited)
    assert f"program.py:{program.line('torch.cuda.graph(')} in capture" in found.mode
    assert f"program.py:{program.line('# multiplies')}" in found.source


def test_a_replaced_static_tensor_is_found(program):
    program = program(REPLACED)
    audited, found = first_finding(program)
    assert (found.kind, found.severity) == ("replaced buffer", "error"), str(audited)
    assert "Engine.x" in found.names
    assert f"program.py:{program.line('torch.cuda.graph(')} in capture" in found.mode


def test_a_stale_read_of_the_pool_is_found(program):
    program = program(STALE)
    audited, found = first_finding(program)
    assert (found.kind, found.severity) == ("stale pool memory", "error"), str(audited)
    assert f"program.py:{program.line('# never filled')} in step" in found.text, str(audited)


def test_a_fault_is_found_in_its_replay_and_node(program):
    program = program(INDEX)
    audited, found = first_finding(program, "--find-fault")
    assert audited.done.returncode
    assert (found.audit, found.severity) == ("fault", "error"), str(audited)
    assert "replay 3" in found.text, str(audited)
    assert f"program.py:{program.line('# selects')}" in found.source, str(audited)


def test_a_weight_zeroed_in_sleep_is_found(program):
    audited, found = first_finding(program(SLEEP))
    assert audited.done.stdout.startswith("error weight differs Sequential.2.weight\n"), str(
        audited
    )
    assert found.kind == "weight differs", str(audited)


def test_pinned_memory_freed_after_the_capture_is_found(program):
    program = program(PINNED)
    audited, found = first_finding(program)
    assert (found.kind, found.severity) == ("freed memory", "error"), str(audited)
    assert "Engine.host" in found.names, str(audited)
    assert f"program.py:{program.line('# copies')}" in found.source, str(audited)


def test_a_weight_that_load_state_dict_puts_elsewhere_is_found_at_the_next_replay(program):
    program = program(MOVED)
    audited, found = first_finding(program)
    assert (found.kind, found.severity) == ("replaced buffer", "error"), str(audited)
    names = {name for each in audited.report.findings for name in each.names}
    assert {"Sequential.0.weight", "Sequential.2.weight"} <= names, str(audited)


def test_the_variable_alone_audits_a_program(program, tmp_path):
    program = program(FREED)
    path = installed(tmp_path / "installed")
    done = program.run(GRAPHKIT_AUDIT="r.json", PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    (found,) = AuditReport.load(program.folder / "r.json").findings
    assert (found.kind, found.severity) == ("freed memory", "error")
    assert f"program.py:{program.line('# multiplies')}" in found.source
