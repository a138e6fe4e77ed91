from graphkit.buffers.accepted import AcceptedCounts as AcceptedCounts
from graphkit.buffers.attention import (
    AttentionBackend as AttentionBackend,
    AttentionInputs as AttentionInputs,
    AttentionMetadata as AttentionMetadata,
)
from graphkit.buffers.draft_inputs import (
    DraftContextInputs as DraftContextInputs,
    DraftExtendInputs as DraftExtendInputs,
    DraftInputs as DraftInputs,
    MultiLayerDraftExtendInputs as MultiLayerDraftExtendInputs,
)
from graphkit.buffers.input_buffers import InputBuffers as InputBuffers
from graphkit.buffers.inputs import (
    Inputs as Inputs,
    StepInputs as StepInputs,
    TargetVerifyInputs as TargetVerifyInputs,
)
from graphkit.buffers.layout import (
    MODEL_DTYPE as MODEL_DTYPE,
    Axis as Axis,
    Capacity as Capacity,
    Field as Field,
    FieldLayout as FieldLayout,
    Pad as Pad,
    Rows as Rows,
    declare as declare,
    fields_of as fields_of,
    resolve as resolve,
    runner_capacity as runner_capacity,
)
from graphkit.buffers.mailbox import ENTRIES as ENTRIES, Mailbox as Mailbox
from graphkit.buffers.validation import validate_field as validate_field, wrong_count as wrong_count
from graphkit.buffers.value_checks import Limits as Limits
from graphkit.buffers.writers import BatchWriter as BatchWriter, FieldWriter as FieldWriter
