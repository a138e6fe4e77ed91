from graphkit.engine.step.acceptance import (
    Verified as Verified,
    finalize_accepted_tree_path as finalize_accepted_tree_path,
)
from graphkit.engine.step.admission import Admission as Admission
from graphkit.engine.step.context import (
    EngineContext as EngineContext,
    StepOptions as StepOptions,
)
from graphkit.engine.step.dflash import DFlashDrafter as DFlashDrafter
from graphkit.engine.step.draft_tree import DraftTree as DraftTree
from graphkit.engine.step.drafter import (
    Drafter as Drafter,
    NullDrafter as NullDrafter,
)
from graphkit.engine.step.eagle import EagleDrafter as EagleDrafter
from graphkit.engine.step.engine_model import EngineModel as EngineModel
from graphkit.engine.step.multi_layer import MultiLayerDrafter as MultiLayerDrafter
from graphkit.engine.step.ngram import NgramDrafter as NgramDrafter
from graphkit.engine.step.output_ring import (
    RequestReport as RequestReport,
    StepBlock as StepBlock,
    StepReport as StepReport,
)
from graphkit.engine.step.prefill_batch import (
    PrefillBatch as PrefillBatch,
    PrefillChunk as PrefillChunk,
)
from graphkit.engine.step.request_state import RequestState as RequestState
from graphkit.engine.step.sampling_params import SamplingParams as SamplingParams
from graphkit.engine.step.spec_step import (
    SpecStep as SpecStep,
    SpecStepInputs as SpecStepInputs,
    SpecStepOutput as SpecStepOutput,
    StepResult as StepResult,
    StepVariant as StepVariant,
)
from graphkit.engine.step.spec_step_runner import SpecStepRunner as SpecStepRunner
from graphkit.engine.step.step_stream import (
    LoopReader as LoopReader,
    StepStream as StepStream,
)
from graphkit.engine.step.verifier import Verifier as Verifier
from graphkit.ops.loop_layout import (
    LoopEnd as LoopEnd,
    RequestEnd as RequestEnd,
)
