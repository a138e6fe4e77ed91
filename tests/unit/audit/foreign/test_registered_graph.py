"""What a program registers for a graph: shadow, pads, dispatch, names and declared state."""

from __future__ import annotations

import sys

import pytest
import torch
from graphbugs import frame

import graphkit as gk
from graphkit.errors import ConfigError

PREAMBLE = """
import graphkit as gk
import torch
from graphbugs.frame import capture, new_graph, numbered, tensor

rows, out, cache = numbered(4, 4), tensor(4, 4, value=0), tensor(16, 4, value=0)
slots = torch.tensor([3, 5, 7, 0])
live = 3

def registered(body, **options):
    body()
    graph = new_graph()
    with capture(graph):
        out.copy_(body())
    inputs = {"rows": (rows, 0, None), "slots": (slots, 0, 0)}
    options = {"live_rows": lambda: live, "name": "verify 4"} | options
    gk.foreign.register(graph, body=body, inputs=inputs, outputs=out, **options)
    return graph

def store():
    cache[slots] += rows
    return cache[slots] * 2
"""


@pytest.fixture
def report(tmp_path):
    """Return ``report(text)``: that of a program with the given functions."""

    def run(text):
        path = tmp_path / "program.py"
        path.write_text(PREAMBLE + text)
        result = frame.audited(path, tmp_path / "report.json")
        run.program = sys.modules.pop("graphbugs_program")
        return result

    return run


pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="GraphBugs runs on the GPU")


def texts(report):
    return {check.audit: check.text for check in report.checks if check.mode == "verify 4"}


@pytest.mark.parametrize("state", ["None", '{"cache": (cache, 0, lambda: slots)}'])
def test_a_sound_graph_has_no_finding_and_the_same_state(report, state):
    text = f"""
def program():
    graph = registered(store, state={state})
    for number in range(4):
        rows.fill_(number + 1.0)
        graph.replay()
"""
    found = report(text)
    assert [finding for finding in found.findings if finding.severity != "note"] == []
    assert texts(found)["shadow"] == "compared 3 live rows with the body"
    assert texts(found)["pads"] == "1 pad row with three contents"
    # A call and the recording add the first rows; each replay adds once.
    expected = 2 * frame.numbered(4, 4)[:3] + 10.0
    assert torch.equal(report.program.cache[[3, 5, 7]], expected)


def test_a_graph_that_differs_from_its_body_names_the_call(report):
    text = """
class Layer:
    def __init__(self):
        self.scale = None

    def __call__(self):
        return rows * float(self.scale_now())

    def scale_now(self):
        return self.scales[-1]

def program():
    layer = Layer()
    layer.scales = [2.0]
    graph = registered(layer)
    layer.scales.append(3.0)
    graph.replay()
"""
    (found,) = report(text).findings
    assert (found.audit, found.kind, found.kernel) == ("shadow", "graph bug", "mul")
    assert "`mul` gets [3.0] now and got [2.0] at the capture" in found.text
    assert "in __call__" in found.source
    assert found.mode == "verify 4"


def test_pads_that_reach_live_rows_are_named_with_their_operation(report):
    text = """
def body():
    return rows - rows.mean(0)

def program():
    registered(body).replay()
"""
    (found,) = report(text).findings
    assert (found.audit, found.kind, found.kernel) == ("pads", "leaking pad row", "mean")
    assert "in body" in found.source


def test_pads_that_the_program_did_not_fill_are_found(report):
    text = """
mask = tensor(4, 1)

def body():
    return rows * (mask / mask.sum())

def program():
    graph = registered(body)
    mask_input = {"rows": (rows, 0, None), "mask": (mask, 0, 0.0)}
    gk.foreign.register(graph, body=body, inputs=mask_input, outputs=out, live_rows=lambda: 3)
    graph.replay()
    mask[3] = 0.0
"""
    (found,) = report(text).findings
    assert found.kind == "leaking pad row"
    assert "with what the program left there" in found.text


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("live = 5", "the graph has 4 rows, and is replayed for 5 live rows."),
        ("mode = 'prefill'", "captured for ('verify', 4) and is replayed for ('prefill', 4)"),
    ],
)
def test_a_graph_of_another_batch_is_wrong(report, change, text):
    program = f"""
mode = "verify"

def program():
    global live, mode
    graph = registered(lambda: rows * 2, key=lambda: (mode, 4))
    {change}
    graph.replay()
"""
    findings = report(program).findings
    assert [(f.audit, f.kind) for f in findings] == [("misses", "wrong graph")]
    assert text in findings[0].text


def test_a_body_with_other_outputs_is_not_compared(report):
    text = """
def program():
    graph = registered(lambda: rows * 2)
    gk.foreign.register(graph, body=lambda: [rows, rows], outputs=out, name="verify 4")
    graph.replay()
"""
    assert texts(report(text))["shadow"].startswith("not checked: the body returns")


TENSOR = torch.zeros(4, 2)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"body": 3}, "body"),
        ({"live_rows": 3}, "live_rows"),
        ({"key": "decode"}, "key"),
        ({"inputs": {"x": TENSOR}}, "inputs"),
        ({"inputs": {"x": (TENSOR, 2, 0)}}, "inputs"),
        ({"inputs": [TENSOR]}, "inputs"),
        ({"state": {"x": (TENSOR, 0)}}, "state"),
    ],
)
def test_wrong_arguments_are_refused(arguments, field):
    with pytest.raises(ConfigError) as error:
        gk.foreign.register(frame.RecordedCUDAGraph(), **arguments)
    assert error.value.field == field


def test_a_kernel_that_is_compiled_after_a_replay_is_a_warning(report):
    text = """
from types import SimpleNamespace
import triton

def compile_kernel(block):
    jit = SimpleNamespace(arg_names=["x", "BLOCK"])
    triton.knobs.runtime.jit_post_compile_hook(
        fn=SimpleNamespace(name="norm", jit_function=jit),
        compile={"signature": {"x": "*fp32", "BLOCK": "constexpr"}, "constants": {(1,): block}})

def program():
    graph = registered(lambda: rows * 2)
    compile_kernel(64)
    graph.replay()
    compile_kernel(128)
"""
    (found,) = report(text).findings
    assert (found.kind, found.severity, found.kernel) == (
        "compiled while serving", "warning", "norm",
    )  # fmt: skip
    assert "x: *fp32, BLOCK = 128" in found.text
