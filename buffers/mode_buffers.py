"""Input buffers of each mode."""

from __future__ import annotations

from graphkit.buffers.draft_inputs import (
    DraftExtendInputs,
    DraftInputs,
    MultiLayerDraftExtendInputs,
)
from graphkit.buffers.input_buffers import InputBuffers
from graphkit.buffers.inputs import TargetVerifyInputs


class TargetVerifyInputBuffers(InputBuffers):
    """Buffers of ``TargetVerifyInputs``."""

    inputs_type = TargetVerifyInputs


class DraftInputBuffers(InputBuffers):
    """Buffers of ``DraftInputs``."""

    inputs_type = DraftInputs


class DraftExtendInputBuffers(InputBuffers):
    """Buffers of ``DraftExtendInputs``, for v1 and v2."""

    inputs_type = DraftExtendInputs


class MultiLayerDraftExtendInputBuffers(InputBuffers):
    """Buffers of ``MultiLayerDraftExtendInputs``. All layers share them."""

    inputs_type = MultiLayerDraftExtendInputs
