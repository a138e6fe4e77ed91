"""DECODE: one token per request, the width-1 case of TARGET_VERIFY."""

from __future__ import annotations

from graphkit.buffers import TargetVerifyInputBuffers, TargetVerifyInputs
from graphkit.runners.masked_step import MaskedStep
from graphkit.runners.outputs import ForwardOutput
from graphkit.runners.runner import Runner
from graphkit.spec import ForwardMode


class DecodeRunner(Runner[TargetVerifyInputs, ForwardOutput]):
    """Decodes one token per request: ``TargetVerifyInputs`` with T = B.

    ``token_bitmask`` is that of ``TargetVerifyRunner``.
    Arguments are those of ``Runner``. Of ``spec`` only the algorithm's name is read.
    """

    mode = ForwardMode.DECODE
    buffers_type = TargetVerifyInputBuffers
    output_type = ForwardOutput
    step_type = MaskedStep
