"""``graphkit record`` leaves the output of a program unchanged and writes every graph."""

import os
import re
import subprocess
import sys

import pytest

from audited_runs import installed
from graphkit.graphs.driver import runtime
from graphkit.records import ForeignRecord

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(runtime() is None, reason="needs cuda-bindings"),
]

HEAD = """
import torch

torch.manual_seed(0)
weight = torch.randn(64, 64, device="cuda")
x = torch.randn(8, 64, device="cuda")

def step(x):
    return torch.relu(x @ weight)  # computes

def replayed(replay, y, times=3):
    for number in range(times):
        x.fill_(number + 1)
        replay()
        print(y.sum().item(), y.flatten()[:4].tolist())

"""

CONTEXT = """
def main():
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # captures
        y = step(x)
    replayed(graph.replay, y)
    graph.reset()

main()
"""

BY_HAND = """
def main(graph):
    with torch.cuda.stream(torch.cuda.Stream()):
        step(x)
        graph.capture_begin()  # captures
        y = step(x)
        graph.capture_end()
    torch.cuda.synchronize()
    if keeps:
        graph.instantiate()
    replayed(graph.replay, y)

for keeps in (False, True):
    main(torch.cuda.CUDAGraph(keep_graph=keeps))
"""

CALLABLES = """
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU()).cuda()
graphed = torch.cuda.make_graphed_callables(model, (x.clone().requires_grad_(),))  # captures
for number in range(3):
    loss = graphed(torch.full_like(x, number + 1.0).requires_grad_()).sum()
    loss.backward()
    print(loss.item(), model[0].weight.grad.sum().item())
"""

COMPILED = """
@torch.compile(mode="reduce-overhead")
def compiled(x):  # compiled
    y = torch.relu(x @ weight) + 1
    return y * torch.sigmoid(y)

def main():
    for number in range(5):
        print(compiled(torch.full_like(x, number + 1.0)).sum().item())

with torch.no_grad():
    main()
"""

SPAWNED = """
import multiprocessing

def child():
    graph = torch.cuda.CUDAGraph()
    step(x)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):  # captures
        y = step(x)
    replayed(graph.replay, y)

if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=child)
    process.start()
    process.join()
    print(process.exitcode)
"""

FAILS = """
def capture(after):
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):  # captures
            y = step(x)
            after(y)
    except RuntimeError as error:
        print(type(error).__name__)
    else:
        replayed(graph.replay, y)

step(x)
capture(lambda y: y.sum().item())
"""


@pytest.fixture
def script(tmp_path):
    """Return ``script(body)``, which writes ``program.py``."""

    def write(body):
        path = tmp_path / "program.py"
        path.write_text(HEAD + body)
        return path

    return write


@pytest.fixture
def run(tmp_path):
    """Return ``run(*arguments)``, which runs Python in the folder of the script."""
    environment = {**os.environ, "PYTHONPATH": installed(tmp_path / "installed")}

    def python(*arguments):
        return subprocess.run(
            [sys.executable, *arguments], cwd=tmp_path, env=environment,
            capture_output=True, text=True, check=False,
        )  # fmt: skip

    return python


@pytest.fixture
def record(run, tmp_path):
    """Return ``record(script)``, which checks that the recorded program has the same output."""

    def run_twice(path):
        plain = run(path.name)
        assert plain.returncode == 0, plain.stderr
        done = run("-m", "graphkit", "record", "--out", "r.json", path.name)
        assert (done.returncode, done.stdout) == (0, plain.stdout), done.stderr
        assert "graphkit record:" not in done.stderr
        return ForeignRecord.load(tmp_path / "r.json"), done.stderr

    return run_twice


def line_of(path, mark):
    """Return the number of the line that ends with a mark."""
    lines = path.read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.endswith(f"# {mark}"))


def assert_computes(graph, path):
    """Check the names of the kernels, and that those of ``step`` have its line."""
    kernels = [node for node in graph.nodes if node.kind == "kernel"]
    assert len(kernels) >= 2
    assert all(kernel.name and kernel.short_name and kernel.grid for kernel in kernels)
    line = f"{path.parent.name}/program.py:{line_of(path, 'computes')} in step"
    assert {kernel.source for kernel in kernels} == {line}
    assert {"aten::mm", "aten::relu"} <= {kernel.op for kernel in kernels}


def location(path, mark, function):
    return f"{path.parent.name}/program.py:{line_of(path, mark)} in {function}"


def test_a_graph_captured_in_a_context(script, record):
    path = script(CONTEXT)
    recording, err = record(path)
    (graph,) = recording.graphs
    assert graph.captured_at == graph.name == location(path, "captures", "main")
    assert_computes(graph, path)
    assert graph.memory.pool_bytes > 0
    assert err.endswith("recorded 1 graph of 1 process: wrote r.json\n")
    assert recording.environment.device


def test_graphs_captured_by_hand_kept_or_not(script, record):
    path = script(BY_HAND)
    recording, _ = record(path)
    assert len(recording.graphs) == 2
    for graph in recording.graphs:
        assert graph.captured_at == location(path, "captures", "main")
        assert_computes(graph, path)


def test_graphed_callables_forward_and_backward(script, record):
    path = script(CALLABLES)
    recording, _ = record(path)
    assert len(recording.graphs) == 2
    for graph in recording.graphs:
        assert graph.captured_at == location(path, "captures", "<module>")
        kernels = [node for node in graph.nodes if node.kind == "kernel"]
        assert kernels
        assert all(kernel.name for kernel in kernels)
    assert any(node.module for node in recording.graphs[0].nodes)


@pytest.mark.slow
def test_graphs_of_torch_compile(script, record):
    """The captured line is that of the compiled function, the innermost outside torch."""
    path = script(COMPILED)
    recording, _ = record(path)
    graphs = [graph for graph in recording.graphs if graph.nodes]  # one only holds the memory pool
    assert graphs
    for graph in graphs:
        assert re.fullmatch(rf"{path.parent.name}/program\.py:\d+ in compiled", graph.captured_at)
        kernels = [node for node in graph.nodes if node.kind == "kernel"]
        assert any("triton" in kernel.name for kernel in kernels)


def test_a_spawned_child(script, record):
    path = script(SPAWNED)
    recording, err = record(path)
    (graph,) = recording.graphs
    assert graph.captured_at == location(path, "captures", "child")
    assert_computes(graph, path)
    (process,) = recording.processes
    assert "--multiprocessing-fork" in process.command
    assert err.endswith("recorded 1 graph of 1 process: wrote r.json\n")


def test_a_failing_capture_fails_as_without_a_recording(script, run, tmp_path):
    path = script(FAILS)
    plain, done = run(path.name), run("-m", "graphkit", "record", path.name)
    assert (done.returncode, done.stdout) == (plain.returncode, plain.stdout)
    assert "nothing recorded: the program captured no graph" in done.stderr
    assert not (tmp_path / "graphkit-record.json").exists()


def test_the_graphs_of_graphkit_itself(script, record):
    """They are recorded although the backend keeps their templates."""
    path = script(
        "import graphkit as gk\n"
        "from graphkit.graphs import CudaBackend\n"
        "backend = CudaBackend()\n"
        "with backend.session():\n"
        "    backend.warm_up(lambda: step(x))\n"
        "    graph = backend.capture(lambda: step(x))  # captures\n"
        "replayed(graph.replay, graph.output)\n"
    )
    recording, _ = record(path)
    (graph,) = recording.graphs
    assert graph.captured_at == location(path, "captures", "<module>")
    assert_computes(graph, path)
