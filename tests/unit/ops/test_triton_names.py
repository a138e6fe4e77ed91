"""What kernels use of Triton beyond its documented names.

A failure here after an upgrade is a change of Triton, not a defect of a kernel. Adapt the module
that the message names, and add the version to its list of checked ones.
"""

from __future__ import annotations

import pytest
import triton
import triton.language as tl
from triton.backends.nvidia.compiler import CUDAOptions
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper

from graphkit.ops.kernels.device_loop import advance_loop_kernel

TRITON = f"Triton {triton.__version__} differs from 3.6.0 and 3.7.1: see graphkit/ops/kernels/"


def test_a_kernel_knows_the_names_of_its_parameters():
    @triton.jit
    def kernel(first, second, BLOCK: tl.constexpr):
        pass

    assert kernel.arg_names == ["first", "second", "BLOCK"], f"{TRITON}launch.py"


def test_a_kernel_can_start_while_the_one_before_runs():
    assert "launch_pdl" in CUDAOptions.__dataclass_fields__, f"{TRITON}launch.py"
    for name in ("gdc_wait", "gdc_launch_dependents"):
        assert hasattr(tl.extra.cuda, name), f"{TRITON}launch.py"


def test_gluon_has_products_of_warpgroups():
    for name in ("fence_async_shared", "warpgroup_mma", "warpgroup_mma_wait"):
        assert hasattr(hopper, name), f"{TRITON}streamed_plain.py"


def test_gluon_copies_by_descriptor_to_memory_with_several_views():
    assert hasattr(gl.shared_memory_descriptor, "_reinterpret"), f"{TRITON}streamed_linear.py"
    assert hasattr(gl, "SharedLinearLayout"), f"{TRITON}streamed_linear.py"
    assert hasattr(hopper.tma, "async_copy_global_to_shared"), f"{TRITON}streamed_linear.py"
    for name in ("init", "expect", "wait", "MBarrierLayout"):
        assert hasattr(hopper.mbarrier, name), f"{TRITON}streamed_linear.py"


@pytest.mark.skipif(
    not isinstance(advance_loop_kernel, triton.JITFunction), reason="TRITON_INTERPRET is set"
)
def test_an_entry_is_published_with_release_semantics():
    names = dict.fromkeys(advance_loop_kernel.arg_names, "i32")
    pointers = {
        "report": "*i32", "loop_rows": "*i64", "loop_watched": "*i1", "control": "*i64",
        "batch_sizes": "*i32", "ring": "*i64",
    }  # fmt: skip
    constants = {"signals": None, "ledger": None, "BLOCK": 4, "BODIES": 2}
    types = names | pointers | dict.fromkeys(constants, "constexpr")
    source = triton.compiler.ASTSource(advance_loop_kernel, types, constants)
    target = triton.backends.compiler.GPUTarget("cuda", 90, 32)
    ptx = triton.compile(source, target=target).asm["ptx"]
    assert ptx.count("st.release.sys.global.u64") == 1, f"{TRITON}device_loop.py"
