"""One speculative step: draft, verify, accept, catch up; captured whole, and looped on the device.

A step reads and writes ``request_state``. A drafter (``eagle``, ``multi_layer``, ``dflash``,
``ngram``) proposes tokens, the ``verifier`` runs the target over them and accepts, and
``spec_step`` joins both. ``admission`` prefills the prompt of a request before its first step.
"""

from graphkit.engine.step.acceptance import Verified, finalize_accepted_tree_path
from graphkit.engine.step.admission import Admission
from graphkit.engine.step.context import EngineContext, StepOptions
from graphkit.engine.step.dflash import DFlashDrafter
from graphkit.engine.step.draft_tree import DraftTree
from graphkit.engine.step.drafter import Drafter, NullDrafter
from graphkit.engine.step.eagle import EagleDrafter
from graphkit.engine.step.engine_model import EngineModel
from graphkit.engine.step.multi_layer import MultiLayerDrafter
from graphkit.engine.step.ngram import NgramDrafter
from graphkit.engine.step.output_ring import RequestReport, StepBlock, StepReport
from graphkit.engine.step.prefill_batch import PrefillBatch, PrefillChunk
from graphkit.engine.step.request_state import RequestState
from graphkit.engine.step.sampling_params import SamplingParams
from graphkit.engine.step.spec_step import (
    SpecStep,
    SpecStepInputs,
    SpecStepOutput,
    StepResult,
    StepVariant,
)
from graphkit.engine.step.spec_step_runner import SpecStepRunner
from graphkit.engine.step.step_stream import LoopReader, StepStream
from graphkit.engine.step.verifier import Verifier
from graphkit.ops.loop_layout import LoopEnd, RequestEnd

__all__ = [
    "Admission",
    "DFlashDrafter",
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
    "SpecStep",
    "SpecStepInputs",
    "SpecStepOutput",
    "SpecStepRunner",
    "StepBlock",
    "StepOptions",
    "StepReport",
    "StepResult",
    "StepStream",
    "StepVariant",
    "Verified",
    "Verifier",
    "finalize_accepted_tree_path",
]
