"""Typed inputs of each mode, and the memory behind them. Imported as ``graphkit.buffers``.

A batch's way: ``inputs`` (what a caller gives) -> ``writers`` -> ``mailbox`` (pinned) -> the
refresh op -> the arena in ``input_buffers`` -> ``view`` (what a forward sees).
"""

from graphkit.buffers.accepted import AcceptedCounts
from graphkit.buffers.admission import admit
from graphkit.buffers.draft_inputs import (
    DraftExtendInputs,
    DraftInputs,
    MultiLayerDraftExtendInputs,
)
from graphkit.buffers.fields import Axis, Field, Pad, Rows, declare, fields_of
from graphkit.buffers.input_buffers import InputBuffers
from graphkit.buffers.inputs import Inputs, TargetVerifyInputs
from graphkit.buffers.layout import Capacity, FieldLayout, capacity_of, resolve
from graphkit.buffers.mailbox import ENTRIES, Mailbox
from graphkit.buffers.mode_buffers import (
    DraftExtendInputBuffers,
    DraftInputBuffers,
    MultiLayerDraftExtendInputBuffers,
    TargetVerifyInputBuffers,
)
from graphkit.buffers.writers import BatchWriter, FieldWriter

__all__ = [
    "ENTRIES",
    "AcceptedCounts",
    "Axis",
    "BatchWriter",
    "Capacity",
    "DraftExtendInputBuffers",
    "DraftExtendInputs",
    "DraftInputBuffers",
    "DraftInputs",
    "Field",
    "FieldLayout",
    "FieldWriter",
    "InputBuffers",
    "Inputs",
    "Mailbox",
    "MultiLayerDraftExtendInputBuffers",
    "MultiLayerDraftExtendInputs",
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
