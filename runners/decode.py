"""DECODE: one token per request, the width-1 case of TARGET_VERIFY."""

from __future__ import annotations

from graphkit.buffers import TargetVerifyInputBuffers
from graphkit.runners.outputs import ForwardOutput
from graphkit.runners.runner import Runner
from graphkit.spec import ForwardMode


class DecodeRunner(Runner[ForwardOutput]):
    """Plain decoding with the machinery of verify: ``TargetVerifyInputs`` with T = B.

    Arguments as in ``Runner``; of ``spec`` only the algorithm's name is read.
    """

    mode = ForwardMode.DECODE
    buffers_type = TargetVerifyInputBuffers
    output_type = ForwardOutput
