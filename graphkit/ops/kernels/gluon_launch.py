"""Programmatic dependent launch for kernels in Gluon; the rules are those of ``launch``.

Gluon is Triton's language with explicit layouts. It is experimental, and Triton's interpreter does
not run it. The kernels that stream a weight, attend from a prompt, or push words to other ranks are
written in it. Checked on Triton 3.6.0 and 3.7.1.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def run_ptx(PTX: gl.constexpr):
    """Run PTX in each thread, as an access to memory; operand 0 is a register that it sets."""
    gl.inline_asm_elementwise(
        PTX, "=r,r,~{memory}", [gl.program_id(0)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def gdc_launch_dependents():
    """Let the next kernel start."""
    run_ptx("griddepcontrol.launch_dependents; mov.b32 $0, 0;")


@gluon.jit
def gdc_wait():
    """Wait until the kernel before has ended and its writes are visible."""
    run_ptx("griddepcontrol.wait; mov.b32 $0, 0;")
