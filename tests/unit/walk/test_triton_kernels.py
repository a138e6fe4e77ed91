"""Names of the parameters of kernels that the real Triton compiler compiled, without a GPU."""

from __future__ import annotations

import pytest
import triton
import triton.language as tl
from torch._inductor.runtime.triton_heuristics import StaticallyLaunchedCudaKernel
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from graphkit.graphs.walk import kernels
from graphkit.graphs.walk.driver_nodes import DriverWalk

NAMES = ["out_ptr", "x_ptr", "factor", "count"]
SCRATCH = ["global_scratch", "profile_scratch"]
LAYOUT = ((0, 8), (8, 8), (16, 4), (20, 4), (24, 8), (32, 8))


@triton.jit
def scale(out_ptr, x_ptr, stride, factor, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(x_ptr + at * stride, at < count) * factor, at < count)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """The kernel, in which ``stride`` is 1 and therefore no parameter, for the device of CI."""
    types = {
        "out_ptr": "*fp32", "x_ptr": "*fp32", "stride": "constexpr", "factor": "fp32",
        "count": "i32", "BLOCK": "constexpr",
    }  # fmt: skip
    source = ASTSource(scale, types, {"stride": 1, "BLOCK": 64})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        return triton.compile(source, target=GPUTarget("cuda", 90, 32))


@pytest.fixture(params=["triton", "torch.compile"])
def loaded(request, compiled, monkeypatch, driver):
    """``loaded(*layout)``: the handle of the kernel in the driver, known to Triton or torch."""
    monkeypatch.setattr(kernels, "_known", {})
    kernel = compiled
    if request.param == "torch.compile":
        monkeypatch.setattr(compiled, "_cubin_path", "", raising=False)
        kernel = StaticallyLaunchedCudaKernel(compiled)

    def load(*layout):
        handle = driver.function("scale", *layout)
        monkeypatch.setattr(kernel, "function", handle)
        return handle

    yield load
    monkeypatch.undo()


def names_of(driver, *handles):
    nodes = (driver.kernel_node(handle) for handle in handles)
    walk = DriverWalk(driver.graph(*nodes))
    return [[parameter.name for parameter in node.parameters] for node in walk.nodes]


@pytest.mark.parametrize("scratch", [0, 1, 2])
def test_the_parameters_of_a_triton_kernel_have_names(driver, loaded, scratch):
    handle = loaded(*LAYOUT[: len(NAMES) + scratch])
    assert names_of(driver, handle, handle) == [[*NAMES, *SCRATCH[:scratch]]] * 2


def test_the_compiler_agrees(compiled):
    """Triton declares as many parameters as this test names."""
    parameters = [line for line in compiled.asm["ptx"].splitlines() if "\t.param ." in line]
    assert len(parameters) == len([*NAMES, *SCRATCH])


@pytest.mark.parametrize("count", [3, 7])
def test_a_kernel_with_another_number_of_parameters_has_no_names(driver, loaded, count):
    handle = loaded(*((8 * i, 8) for i in range(count)))
    assert names_of(driver, handle) == [[""] * count]


def test_other_kernels_have_no_names(driver, loaded):
    known = loaded(*LAYOUT)
    other, mangled = driver.function("scale", *LAYOUT), driver.function("_Z5scalev", *LAYOUT)
    assert names_of(driver, known, other, mangled)[1:] == [[""] * 6] * 2


def test_the_objects_of_the_process_are_listed_once(driver, loaded, monkeypatch):
    handle, other = loaded(*LAYOUT), driver.function("other", (0, 8))
    first = names_of(driver, handle, other)
    monkeypatch.delattr(kernels, "find_objects")
    assert names_of(driver, handle, other) == first


@pytest.mark.parametrize("function", [0x1000, [], None])
def test_objects_of_other_libraries_with_such_a_name_are_ignored(driver, loaded, function):
    others = type("CompiledKernel", (), {"function": function})()
    handle = loaded(*LAYOUT)
    assert names_of(driver, handle)[0] == [*NAMES, *SCRATCH], others
