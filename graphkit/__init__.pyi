# Public names by subject, each with its room; graphkit/lazy_names.py reads them, too.
# The order of the subjects is that of the reference.

# Settings: sizes, algorithms, forward modes.
from graphkit.config import BufferSizes as BufferSizes
from graphkit.spec import (
    CustomSpecAlgorithm as CustomSpecAlgorithm,
    ForwardMode as ForwardMode,
    FutureMap as FutureMap,
    Plan as Plan,
    SpecAlgorithm as SpecAlgorithm,
    SpecConfig as SpecConfig,
    get_algorithm as get_algorithm,
    register_algorithm as register_algorithm,
)

# Inputs of each mode, their buffers, and the declaration of fields.
from graphkit.buffers import (
    AcceptedCounts as AcceptedCounts,
    Axis as Axis,
    Capacity as Capacity,
    DraftContextInputs as DraftContextInputs,
    DraftExtendInputs as DraftExtendInputs,
    DraftInputs as DraftInputs,
    InputBuffers as InputBuffers,
    Inputs as Inputs,
    MODEL_DTYPE as MODEL_DTYPE,
    MultiLayerDraftExtendInputs as MultiLayerDraftExtendInputs,
    Pad as Pad,
    Rows as Rows,
    StepInputs as StepInputs,
    TargetVerifyInputs as TargetVerifyInputs,
    declare as declare,
)

# Outputs of each mode.
from graphkit.runners import (
    DraftContextOutput as DraftContextOutput,
    DraftExtendOutput as DraftExtendOutput,
    DraftOutput as DraftOutput,
    ForwardOutput as ForwardOutput,
    LastRowOutput as LastRowOutput,
    LayersOutput as LayersOutput,
    ObservedReplay as ObservedReplay,
    Output as Output,
    declare_output as declare_output,
)

# Runners: capture, replay, stage, fall back.
from graphkit.runners import (
    Decision as Decision,
    DecodeRunner as DecodeRunner,
    DraftExtendRunner as DraftExtendRunner,
    DraftExtendV2Runner as DraftExtendV2Runner,
    DraftRunner as DraftRunner,
    MultiLayerEagleRunner as MultiLayerEagleRunner,
    RUNNERS as RUNNERS,
    Reason as Reason,
    Runner as Runner,
    SampleRows as SampleRows,
    StagedBatch as StagedBatch,
    StepRunner as StepRunner,
    TargetVerifyRunner as TargetVerifyRunner,
)

# Any function of tensors, captured from an example of its arguments.
from graphkit.runners.functions import (
    CapturedFunction as CapturedFunction,
    StagedCall as StagedCall,
    capture as capture,
)

# Several GPUs: ranks that agree on what they replay.
from graphkit.runners import (
    AgreedSize as AgreedSize,
    RunnerGroup as RunnerGroup,
)
from graphkit.distributed import RankGroup as RankGroup

# Backends that capture, and backends of attention.
from graphkit.buffers import (
    AttentionBackend as AttentionBackend,
    AttentionInputs as AttentionInputs,
    AttentionMetadata as AttentionMetadata,
)
from graphkit.graphs import (
    Backend as Backend,
    CaptureFailure as CaptureFailure,
    CapturedGraph as CapturedGraph,
    CudaBackend as CudaBackend,
    RecorderBackend as RecorderBackend,
    SizeTable as SizeTable,
)
from graphkit.engine.attention import (
    PagedAttention as PagedAttention,
    PooledAttention as PooledAttention,
    SdpaAttention as SdpaAttention,
    TritonAttention as TritonAttention,
)

# Pools of KV slots, of recurrent states and of request rows.
from graphkit.engine.kv import (
    DSATokenToKVPool as DSATokenToKVPool,
    KVPool as KVPool,
    MHATokenToKVPool as MHATokenToKVPool,
    MLATokenToKVPool as MLATokenToKVPool,
    RecurrentInputs as RecurrentInputs,
    RecurrentStatePool as RecurrentStatePool,
    ScanShape as ScanShape,
    ReqToTokenPool as ReqToTokenPool,
    RequestPool as RequestPool,
    RequestTable as RequestTable,
    StateSlots as StateSlots,
    TokenSlotAllocator as TokenSlotAllocator,
    TokenToKVPool as TokenToKVPool,
)
from graphkit.runners import RecurrentStates as RecurrentStates

# Inspection of graphs, and records.
from graphkit.records import (
    Argument as Argument,
    BufferRecord as BufferRecord,
    CaptureRecord as CaptureRecord,
    Edge as Edge,
    Environment as Environment,
    GraphMemory as GraphMemory,
    GraphRecord as GraphRecord,
    MemoryEstimate as MemoryEstimate,
    Mismatch as Mismatch,
    ModeMemory as ModeMemory,
    ModeRecord as ModeRecord,
    Node as Node,
    Pointer as Pointer,
    Record as Record,
    ReplayStats as ReplayStats,
    SizeRecord as SizeRecord,
    Timing as Timing,
    load_record as load_record,
)
from graphkit.graphs import (
    Attribution as Attribution,
    NamedTensors as NamedTensors,
    NodeOrigin as NodeOrigin,
    inspect_graph as inspect_graph,
    scope as scope,
)

# Targets: capture with checks, audits, comparison of live replays.
from graphkit.records import (
    AuditCheck as AuditCheck,
    AuditReport as AuditReport,
    Finding as Finding,
    GraphBaseline as GraphBaseline,
)
from graphkit.runners.targets import CaptureTarget as CaptureTarget
from graphkit.audit import (
    ShadowWatch as ShadowWatch,
    audit_target as audit_target,
)
from graphkit.audit.runs.capture import (
    capture_target as capture_target,
    estimate_target as estimate_target,
)

# Graphs of other programs: audits, and digests around a sleep or an update.
from graphkit.audit.foreign import (
    audit_graphs as audit_graphs,
    compare_digest as compare_digest,
    graph_digest as graph_digest,
)

# The whole step, captured and looped on the device; drafting algorithms.
from graphkit.engine.step import (
    DFlashDrafter as DFlashDrafter,
    DraftTree as DraftTree,
    Drafter as Drafter,
    EagleDrafter as EagleDrafter,
    EngineContext as EngineContext,
    EngineModel as EngineModel,
    LoopEnd as LoopEnd,
    MultiLayerDrafter as MultiLayerDrafter,
    NgramDrafter as NgramDrafter,
    NullDrafter as NullDrafter,
    PrefillBatch as PrefillBatch,
    PrefillChunk as PrefillChunk,
    RequestEnd as RequestEnd,
    RequestReport as RequestReport,
    RequestState as RequestState,
    SamplingParams as SamplingParams,
    SpecStep as SpecStep,
    SpecStepInputs as SpecStepInputs,
    SpecStepOutput as SpecStepOutput,
    SpecStepRunner as SpecStepRunner,
    StepReport as StepReport,
    StepResult as StepResult,
    StepStream as StepStream,
    StepVariant as StepVariant,
    Verified as Verified,
    Verifier as Verifier,
)
from graphkit.graphs import LoopGraph as LoopGraph

# Engine.
from graphkit.engine import (
    ChatTokenizer as ChatTokenizer,
    EngineStats as EngineStats,
    EngineThread as EngineThread,
    FinishReason as FinishReason,
    NewTokens as NewTokens,
    OpenAIRequest as OpenAIRequest,
    Request as Request,
    RequestOutput as RequestOutput,
    RequestStream as RequestStream,
    SpeculativeEngine as SpeculativeEngine,
    TextStream as TextStream,
    TimeHistogram as TimeHistogram,
    TokenDecoder as TokenDecoder,
    TokenMatcher as TokenMatcher,
)

# Errors: every error that a caller can provoke derives from GraphkitError.
from graphkit.errors import (
    AttentionError as AttentionError,
    CaptureCause as CaptureCause,
    CaptureError as CaptureError,
    CheckpointError as CheckpointError,
    ConfigError as ConfigError,
    DeviceError as DeviceError,
    GraphkitError as GraphkitError,
    InputError as InputError,
    InspectError as InspectError,
    OutputError as OutputError,
    QueueFullError as QueueFullError,
    RankError as RankError,
    RecordError as RecordError,
    ReplayError as ReplayError,
    SizeError as SizeError,
    TargetError as TargetError,
)

# Not in `__all__`: `graphkit.models` and `graphkit.foreign`, which are attributes, and the version.
from graphkit import models as models
import graphkit.audit.foreign as foreign  # noqa: F401

__version__: str
