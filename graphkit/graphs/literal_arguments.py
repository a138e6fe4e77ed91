"""Reader of bytecode: whether a call is written with a literal argument.

A function mode sees the value of an argument, not how the call spells it: ``device="cpu"`` and
``device=x.device`` are equal on a CPU. The bytecode of the caller tells them apart. It changes
between versions of CPython (https://docs.python.org/3/library/dis.html); the positions of
instructions exist since 3.11 (PEP 657). Checked on 3.11 and 3.12;
``tests/unit/test_private_names.py`` names what another version changes.
"""

from __future__ import annotations

import dis
import sys
from functools import cache
from types import CodeType


def caller_passes(literal: str, function: str) -> bool:
    """Return whether a literal is in the call of a function by the caller of this one's caller.

    Call it from ``__torch_function__``, whose caller is the code that calls torch.

    Args:
        literal: The literal, such as ``cpu``.
        function: Name of the function that is called.
    """
    caller = sys._getframe(2)
    return _has_literal(caller.f_code, caller.f_lasti, literal, function)


@cache
def _has_literal(code: CodeType, offset: int, literal: str, function: str) -> bool:
    """Return whether a literal follows a function's name in the lines of the call at an offset."""
    before = [step for step in dis.get_instructions(code) if step.offset <= offset]
    lines = before[-1].positions
    if lines is None or lines.lineno is None or lines.end_lineno is None:
        return False
    called, found = False, False
    for instruction in before:
        line = instruction.positions.lineno if instruction.positions else None
        if line is None or not lines.lineno <= line <= lines.end_lineno:
            continue
        if instruction.argval == function:
            called, found = True, False  # the arguments follow the function
        found = found or (called and instruction.argval == literal)
    return found
