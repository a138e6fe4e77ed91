"""Capture of any function of tensors: its inputs and outputs are learnt from an example.

``arguments`` and ``results`` turn the function into a step with declared inputs and outputs, which
a ``StepRunner`` captures. ``row_checks`` runs the function on drawn rows: its rows must be
independent, and pads must not write where rows of a batch do (``written_tensors``).
``function_capture`` captures the step and compares it with the function itself, and
``captured_function`` is what callers get.
"""

from graphkit.runners.functions.arguments import Arguments
from graphkit.runners.functions.captured_function import CapturedFunction, StagedCall
from graphkit.runners.functions.function_capture import capture
from graphkit.runners.functions.results import Results

__all__ = ["Arguments", "CapturedFunction", "Results", "StagedCall", "capture"]
