"""Typed inputs of each mode, and their memory. Imported as ``graphkit.buffers``.

A batch takes this path: ``inputs`` (the caller's arrays) -> ``writers`` -> ``mailbox`` (pinned
memory) -> the refresh op -> the arena in ``input_buffers`` -> ``view`` (the forward's inputs).
"""

from graphkit.buffers.accepted import AcceptedCounts
from graphkit.buffers.attention import AttentionBackend, AttentionInputs, AttentionMetadata
from graphkit.buffers.draft_inputs import (
    DraftContextInputs,
    DraftExtendInputs,
    DraftInputs,
    MultiLayerDraftExtendInputs,
)
from graphkit.buffers.fields import MODEL_DTYPE, Axis, Field, Pad, Rows, declare, fields_of
from graphkit.buffers.input_buffers import InputBuffers
from graphkit.buffers.inputs import Inputs, StepInputs, TargetVerifyInputs
from graphkit.buffers.layout import Capacity, FieldLayout, resolve, runner_capacity
from graphkit.buffers.mailbox import ENTRIES, Mailbox
from graphkit.buffers.validation import validate_field, wrong_count
from graphkit.buffers.value_rules import Limits
from graphkit.buffers.writers import BatchWriter, FieldWriter

__all__ = [
    "ENTRIES",
    "MODEL_DTYPE",
    "AcceptedCounts",
    "AttentionBackend",
    "AttentionInputs",
    "AttentionMetadata",
    "Axis",
    "BatchWriter",
    "Capacity",
    "DraftContextInputs",
    "DraftExtendInputs",
    "DraftInputs",
    "Field",
    "FieldLayout",
    "FieldWriter",
    "InputBuffers",
    "Inputs",
    "Limits",
    "Mailbox",
    "MultiLayerDraftExtendInputs",
    "Pad",
    "Rows",
    "StepInputs",
    "TargetVerifyInputs",
    "declare",
    "fields_of",
    "resolve",
    "runner_capacity",
    "validate_field",
    "wrong_count",
]
