"""CUDA graphs for every forward mode of speculative decoding, around a model forward you wrote.

Public names load on first use, so that ``import graphkit`` and ``graphkit --help`` do not import
torch. ``__all__`` lists them by subject.
"""

from __future__ import annotations

import logging
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from graphkit.version import __version__ as __version__

if TYPE_CHECKING:
    from graphkit.audit import ShadowWatch, audit_target
    from graphkit.audit.foreign import audit_graphs, compare_digest, graph_digest
    from graphkit.audit.runs import capture_target, estimate_target
    from graphkit.buffers import (
        MODEL_DTYPE,
        AcceptedCounts,
        AttentionBackend,
        AttentionInputs,
        AttentionMetadata,
        Axis,
        Capacity,
        DraftContextInputs,
        DraftExtendInputs,
        DraftInputs,
        InputBuffers,
        Inputs,
        MultiLayerDraftExtendInputs,
        Pad,
        Rows,
        StepInputs,
        TargetVerifyInputs,
        declare,
    )
    from graphkit.config import BufferSizes
    from graphkit.distributed import RankGroup
    from graphkit.engine import (
        EngineStats,
        FinishReason,
        NewTokens,
        Request,
        SpeculativeEngine,
        TokenMatcher,
    )
    from graphkit.engine.attention import (
        PagedAttention,
        PooledAttention,
        SdpaAttention,
        TritonAttention,
    )
    from graphkit.engine.kv import (
        DSATokenToKVPool,
        KVPool,
        MHATokenToKVPool,
        MLATokenToKVPool,
        RecurrentInputs,
        RecurrentStatePool,
        ReqToTokenPool,
        RequestPool,
        RequestTable,
        StateSlots,
        TokenSlotAllocator,
        TokenToKVPool,
    )
    from graphkit.engine.step import (
        DFlashDrafter,
        Drafter,
        DraftTree,
        EagleDrafter,
        EngineContext,
        EngineModel,
        LoopEnd,
        MultiLayerDrafter,
        NgramDrafter,
        NullDrafter,
        PrefillBatch,
        PrefillChunk,
        RequestEnd,
        RequestReport,
        RequestState,
        SamplingParams,
        SpecStep,
        SpecStepInputs,
        SpecStepOutput,
        SpecStepRunner,
        StepReport,
        StepResult,
        StepStream,
        StepVariant,
        Verified,
        Verifier,
    )
    from graphkit.errors import (
        AttentionError,
        CaptureCause,
        CaptureError,
        CheckpointError,
        ConfigError,
        DeviceError,
        GraphkitError,
        InputError,
        InspectError,
        OutputError,
        RankError,
        RecordError,
        ReplayError,
        SizeError,
        TargetError,
    )
    from graphkit.graphs import (
        Attribution,
        Backend,
        CapturedGraph,
        CaptureFailure,
        CudaBackend,
        LoopGraph,
        NamedTensors,
        NodeOrigin,
        RecorderBackend,
        SizeTable,
        inspect_graph,
        scope,
    )
    from graphkit.records import (
        Argument,
        AuditCheck,
        AuditReport,
        BufferRecord,
        CaptureRecord,
        Edge,
        Environment,
        Finding,
        GraphBaseline,
        GraphMemory,
        GraphRecord,
        MemoryEstimate,
        Mismatch,
        ModeMemory,
        ModeRecord,
        Node,
        Pointer,
        Record,
        ReplayStats,
        SizeRecord,
        Timing,
        load_record,
    )
    from graphkit.runners import (
        RUNNERS,
        AgreedSize,
        Decision,
        DecodeRunner,
        DraftContextOutput,
        DraftExtendOutput,
        DraftExtendRunner,
        DraftExtendV2Runner,
        DraftOutput,
        DraftRunner,
        ForwardOutput,
        LastRowOutput,
        LayersOutput,
        MultiLayerEagleRunner,
        ObservedReplay,
        Output,
        Reason,
        RecurrentStates,
        Runner,
        RunnerGroup,
        SampleRows,
        StagedBatch,
        StepRunner,
        TargetVerifyRunner,
        declare_output,
    )
    from graphkit.runners.functions import CapturedFunction, StagedCall, capture
    from graphkit.runners.targets import CaptureTarget
    from graphkit.spec import (
        CustomSpecAlgorithm,
        ForwardMode,
        FutureMap,
        Plan,
        SpecAlgorithm,
        SpecConfig,
        get_algorithm,
        register_algorithm,
    )

# A library logs nothing by itself: the program configures handlers.
logging.getLogger(__name__).addHandler(logging.NullHandler())

_ROOMS = (
    "errors", "config", "records", "audit.foreign", "spec", "graphs", "engine.kv",
    "engine.attention", "buffers", "distributed", "runners", "engine.step", "runners.targets",
    "audit.runs", "engine", "audit", "runners.functions",
)  # fmt: skip
"""Rooms of the public names; those without torch come first."""

__all__ = [  # noqa: RUF022 - sorted within each subject
    # Settings: sizes, algorithms, forward modes.
    "BufferSizes",
    "CustomSpecAlgorithm",
    "ForwardMode",
    "FutureMap",
    "Plan",
    "SpecAlgorithm",
    "SpecConfig",
    "get_algorithm",
    "register_algorithm",
    # Inputs of each mode, their buffers, and the declaration of fields.
    "AcceptedCounts",
    "Axis",
    "Capacity",
    "DraftContextInputs",
    "DraftExtendInputs",
    "DraftInputs",
    "InputBuffers",
    "Inputs",
    "MODEL_DTYPE",
    "MultiLayerDraftExtendInputs",
    "Pad",
    "Rows",
    "StepInputs",
    "TargetVerifyInputs",
    "declare",
    # Outputs of each mode.
    "DraftContextOutput",
    "DraftExtendOutput",
    "DraftOutput",
    "ForwardOutput",
    "LastRowOutput",
    "LayersOutput",
    "ObservedReplay",
    "Output",
    "declare_output",
    # Runners: capture, replay, stage, fall back.
    "Decision",
    "DecodeRunner",
    "DraftExtendRunner",
    "DraftExtendV2Runner",
    "DraftRunner",
    "MultiLayerEagleRunner",
    "RUNNERS",
    "Reason",
    "Runner",
    "SampleRows",
    "StagedBatch",
    "StepRunner",
    "TargetVerifyRunner",
    # Any function of tensors, captured from an example of its arguments.
    "CapturedFunction",
    "StagedCall",
    "capture",
    # Several GPUs: ranks that agree on what they replay.
    "AgreedSize",
    "RankGroup",
    "RunnerGroup",
    # Backends that capture, and backends of attention.
    "AttentionBackend",
    "AttentionInputs",
    "AttentionMetadata",
    "Backend",
    "CaptureFailure",
    "CapturedGraph",
    "CudaBackend",
    "PagedAttention",
    "PooledAttention",
    "RecorderBackend",
    "SdpaAttention",
    "SizeTable",
    "TritonAttention",
    # Pools of KV slots, of recurrent states and of request rows.
    "DSATokenToKVPool",
    "KVPool",
    "MHATokenToKVPool",
    "MLATokenToKVPool",
    "RecurrentInputs",
    "RecurrentStatePool",
    "RecurrentStates",
    "ReqToTokenPool",
    "RequestPool",
    "RequestTable",
    "StateSlots",
    "TokenSlotAllocator",
    "TokenToKVPool",
    # Inspection of graphs, and records.
    "Argument",
    "Attribution",
    "BufferRecord",
    "CaptureRecord",
    "Edge",
    "Environment",
    "GraphMemory",
    "GraphRecord",
    "MemoryEstimate",
    "Mismatch",
    "ModeMemory",
    "ModeRecord",
    "NamedTensors",
    "Node",
    "NodeOrigin",
    "Pointer",
    "Record",
    "ReplayStats",
    "SizeRecord",
    "Timing",
    "inspect_graph",
    "load_record",
    "scope",
    # Targets: capture with checks, audits, comparison of live replays.
    "AuditCheck",
    "AuditReport",
    "CaptureTarget",
    "Finding",
    "GraphBaseline",
    "ShadowWatch",
    "audit_target",
    "capture_target",
    "estimate_target",
    # Graphs of other programs: audits, and digests around a sleep or an update.
    "audit_graphs",
    "compare_digest",
    "graph_digest",
    # The whole step, captured and looped on the device; drafting algorithms.
    "DFlashDrafter",
    "DraftTree",
    "Drafter",
    "EagleDrafter",
    "EngineContext",
    "EngineModel",
    "LoopEnd",
    "LoopGraph",
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
    "StepReport",
    "StepResult",
    "StepStream",
    "StepVariant",
    "Verified",
    "Verifier",
    # Engine.
    "EngineStats",
    "FinishReason",
    "NewTokens",
    "Request",
    "SpeculativeEngine",
    "TokenMatcher",
    # Errors: every error that a caller can provoke derives from GraphkitError.
    "AttentionError",
    "CaptureCause",
    "CaptureError",
    "CheckpointError",
    "ConfigError",
    "DeviceError",
    "GraphkitError",
    "InputError",
    "InspectError",
    "OutputError",
    "RankError",
    "RecordError",
    "ReplayError",
    "SizeError",
    "TargetError",
]


def __getattr__(name: str) -> Any:
    if name == "models":
        return import_module("graphkit.models")
    if name in __all__:
        for room in _ROOMS:
            module = import_module(f"graphkit.{room}")
            found = getattr(module, name, None)
            if found is not None and not isinstance(found, ModuleType):  # a file may share the name
                # Later accesses find the name without a call of this function.
                return globals().setdefault(name, found)
    raise AttributeError(f"module 'graphkit' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
