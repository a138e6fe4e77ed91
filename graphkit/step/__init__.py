"""One speculative step: draft, verify, accept, catch up; captured whole, and looped on the device.

A step reads and writes ``request_state``. A drafter (``eagle``, ``multi_layer``, ``dflash``,
``ngram``) proposes tokens, the ``verifier`` runs the target over them and accepts, and
``device_step`` joins both. ``admission`` prefills the prompt of a request before its first step.
"""

from graphkit.ops.loop_layout import LoopEnd, RequestEnd
from graphkit.step.acceptance import finalize_accepted_tree_path
from graphkit.step.admission import Admission
from graphkit.step.context import EngineContext, StepOptions
from graphkit.step.device_step import (
    DeviceStep,
    SpecStepInputs,
    SpecStepOutput,
    StepBody,
    StepResult,
)
from graphkit.step.dflash import DFlashDrafter
from graphkit.step.draft_tree import DraftTree
from graphkit.step.drafter import Drafter, NullDrafter
from graphkit.step.eagle import EagleDrafter
from graphkit.step.engine_model import EngineModel
from graphkit.step.multi_layer import MultiLayerDrafter
from graphkit.step.ngram import NgramDrafter
from graphkit.step.output_ring import RequestReport, StepBlock, StepReport
from graphkit.step.prefill_batch import PrefillBatch, PrefillChunk
from graphkit.step.request_state import RequestState
from graphkit.step.sampling_params import SamplingParams
from graphkit.step.spec_step_runner import SpecStepRunner
from graphkit.step.step_stream import LoopReader, StepStream
from graphkit.step.verified import Verified
from graphkit.step.verifier import Verifier

__all__ = [
    "Admission",
    "DFlashDrafter",
    "DeviceStep",
    "DraftTree",
    "Drafter",
    "EagleDrafter",
    "EngineContext",
    "EngineModel",
    "LoopEnd",
    "LoopReader",
    "MultiLayerDrafter",
    "NgramDrafter",
    "NullDrafter",
    "PrefillBatch",
    "PrefillChunk",
    "RequestEnd",
    "RequestReport",
    "RequestState",
    "SamplingParams",
    "SpecStepInputs",
    "SpecStepOutput",
    "SpecStepRunner",
    "StepBlock",
    "StepBody",
    "StepOptions",
    "StepReport",
    "StepResult",
    "StepStream",
    "Verified",
    "Verifier",
    "finalize_accepted_tree_path",
]
