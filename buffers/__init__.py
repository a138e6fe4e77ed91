"""Typed inputs of each mode, and the memory behind them. Imported as ``graphkit.buffers``.

A batch's way: ``inputs`` (what a caller gives) -> ``writers`` -> ``mailbox`` (pinned) -> the
refresh op -> the arena in ``input_buffers`` -> ``view`` (what a forward sees).
"""

from graphkit.buffers.admission import admit
from graphkit.buffers.fields import Axis, Field, Pad, Rows, declare, fields_of
from graphkit.buffers.input_buffers import InputBuffers, TargetVerifyInputBuffers
from graphkit.buffers.inputs import Inputs, TargetVerifyInputs
from graphkit.buffers.layout import Capacity, FieldLayout, capacity_of, resolve
from graphkit.buffers.mailbox import SLOTS, Mailbox
from graphkit.buffers.writers import BatchWriter, FieldWriter

__all__ = [
    "SLOTS",
    "Axis",
    "BatchWriter",
    "Capacity",
    "Field",
    "FieldLayout",
    "FieldWriter",
    "InputBuffers",
    "Inputs",
    "Mailbox",
    "Pad",
    "Rows",
    "TargetVerifyInputBuffers",
    "TargetVerifyInputs",
    "admit",
    "capacity_of",
    "declare",
    "fields_of",
    "resolve",
]
