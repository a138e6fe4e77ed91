"""Names of the arguments of Triton's kernels and of those that torch.compile generates."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

import graphkit as gk
from graphkit.graphs.driver import runtime
from graphkit.ops.kernels.devices import has_dependent_launch
from graphkit.ops.quantized_linear import quantized_linear
from graphkit.records import GraphRecord

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(runtime() is None, reason="needs cuda-bindings"),
]


@triton.jit
def scale(out_ptr, x_ptr, stride, factor, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(x_ptr + at * stride, at < count) * factor, at < count)


def named(node):
    return {argument.name: argument for argument in node.arguments}


@pytest.mark.parametrize("stride", [1, 2])
def test_arguments_of_a_triton_kernel(kept_graph, stride):
    """A stride of 1 is a constant of the compiled kernel, and no argument."""
    x = torch.randn(2000, device="cuda")
    out = torch.empty(1000, device="cuda")

    def step():
        scale[(8,)](out, x, stride, 0.5, 1000, BLOCK=128)

    record = gk.inspect_graph(kept_graph(step), names={"input": {"x": x}, "state": {"out": out}})
    (node,) = record.nodes
    found = named(node)
    assert [n for n in found if n.endswith("_scratch")] == list(found)[-2:]
    expected = {"out_ptr": "out", "x_ptr": "x", "factor": "0.5", "count": "1000"}
    if stride > 1:
        expected["stride"] = f"{stride}"
    assert {n: a.text for n, a in found.items() if not n.endswith("_scratch")} == expected
    assert GraphRecord.from_json(record.to_json()) == record


@pytest.mark.skipif(
    not torch.cuda.is_available() or not has_dependent_launch(torch.device("cuda", 0)),
    reason="needs compute capability 9.0",
)
def test_a_tensor_that_a_kernel_copies_by_descriptor(kept_graph):
    """A descriptor is a structure, which begins with the address of the tensor."""
    numbers = torch.zeros(64, 1024, dtype=torch.float8_e4m3fn, device="cuda")
    x = torch.zeros(2, 1024, dtype=torch.bfloat16, device="cuda")
    scale = torch.ones(64, 1, device="cuda")

    def step():
        quantized_linear(x, numbers, scale, split_k_partials=True)

    tensors = {"input": {"x": x}, "state": {"numbers": numbers}}
    (node,) = gk.inspect_graph(kept_graph(step), names=tensors).nodes
    assert node.short_name == "streamed_linear_kernel"
    found = named(node)
    assert [each.name for each in found["weight"].pointers] == ["numbers"]
    assert [each.name for each in found["x"].pointers] == ["x"]
    assert found["weight.shape[4]"].text == "128"


def test_arguments_of_a_compiled_function(kept_graph):
    x = torch.randn(1000, device="cuda")

    @torch.compile
    def step():
        return torch.nn.functional.silu(x) * 3 + 1

    record = gk.inspect_graph(kept_graph(step), names={"input": {"x": x}})
    (node,) = record.nodes
    found = named(node)
    assert found["in_ptr0"].text == "x"
    assert found["out_ptr0"].kind == "pointer"


def test_arguments_of_other_kernels_have_no_names(kept_graph):
    x = torch.randn(64, 64, device="cuda")
    record = gk.inspect_graph(kept_graph(lambda: (x @ x).sin()))
    kernels = [node for node in record.nodes if node.kind == "kernel"]
    assert {argument.name for node in kernels for argument in node.arguments} == {""}


def test_the_kernels_of_a_runner_have_names(make_runner):
    runner = make_runner()
    runner.capture()
    nodes = runner.inspect(4).nodes
    fetch = next(node for node in nodes if node.short_name == "fetch_kernel")
    assert {"mailbox", "state", "entry"} <= named(fetch).keys()


def test_pointers_have_the_bytes_of_their_tensors(kept_graph):
    """Those of the pool, too, where an operation made the node."""
    x, w = (torch.randn(64, 64, device="cuda") for _ in range(2))
    where = gk.Attribution()
    graph = kept_graph(lambda: torch.relu(x @ w[:, :32]), where)
    record = gk.inspect_graph(graph, names={"input": {"x": x}}, attribution=where)
    relu = record.nodes[-1]
    sizes = [p.size for a in relu.arguments for p in a.pointers if p.memory == "pool"]
    assert sizes == [8192, 8192]
    product = [p for node in record.nodes[:-1] for a in node.arguments for p in a.pointers]
    assert 64 * 64 * 4 in [p.size for p in product if p.name == "x"]
