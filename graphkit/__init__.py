"""CUDA graphs for every forward mode of speculative decoding, around a forward you wrote.

Public names load on first use, so that ``import graphkit`` and ``graphkit --help`` stay free of
torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from graphkit.version import __version__ as __version__

if TYPE_CHECKING:
    from graphkit.attention import AttentionBackend, AttentionMetadata
    from graphkit.buffers import (
        AcceptedCounts,
        DraftExtendInputBuffers,
        DraftExtendInputs,
        DraftInputBuffers,
        DraftInputs,
        Inputs,
        MultiLayerDraftExtendInputBuffers,
        MultiLayerDraftExtendInputs,
        TargetVerifyInputBuffers,
        TargetVerifyInputs,
    )
    from graphkit.config import BufferSizes
    from graphkit.engine import SamplingParams, SpeculativeEngine
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
        RecordError,
        ReplayError,
        SizeError,
        TargetError,
    )
    from graphkit.graphs import (
        Attribution,
        CudaBackend,
        RecorderBackend,
        SizeTable,
        inspect_graph,
        scope,
    )
    from graphkit.records import CaptureRecord, GraphRecord, ReplayStats
    from graphkit.runners import (
        Decision,
        DecodeRunner,
        DraftExtendOutput,
        DraftExtendRunner,
        DraftExtendV2Runner,
        DraftOutput,
        DraftRunner,
        ForwardOutput,
        MultiLayerEagleRunner,
        TargetVerifyRunner,
    )
    from graphkit.spec import (
        CustomSpecAlgorithm,
        ForwardMode,
        FutureMap,
        SpecAlgorithm,
        SpecConfig,
        get_algorithm,
        register_algorithm,
    )
    from graphkit.targets import CaptureTarget
    from graphkit.verify import capture_target

_ROOMS = (
    "errors", "config", "records", "spec", "graphs", "attention", "buffers", "runners", "targets",
    "engine", "verify",
)  # fmt: skip
"""Where public names live, those without torch first."""

__all__ = [
    "AcceptedCounts",
    "AttentionBackend",
    "AttentionError",
    "AttentionMetadata",
    "Attribution",
    "BufferSizes",
    "CaptureCause",
    "CaptureError",
    "CaptureRecord",
    "CaptureTarget",
    "CheckpointError",
    "ConfigError",
    "CudaBackend",
    "CustomSpecAlgorithm",
    "Decision",
    "DecodeRunner",
    "DeviceError",
    "DraftExtendInputBuffers",
    "DraftExtendInputs",
    "DraftExtendOutput",
    "DraftExtendRunner",
    "DraftExtendV2Runner",
    "DraftInputBuffers",
    "DraftInputs",
    "DraftOutput",
    "DraftRunner",
    "ForwardMode",
    "ForwardOutput",
    "FutureMap",
    "GraphRecord",
    "GraphkitError",
    "InputError",
    "Inputs",
    "InspectError",
    "MultiLayerDraftExtendInputBuffers",
    "MultiLayerDraftExtendInputs",
    "MultiLayerEagleRunner",
    "OutputError",
    "RecordError",
    "RecorderBackend",
    "ReplayError",
    "ReplayStats",
    "SamplingParams",
    "SizeError",
    "SizeTable",
    "SpecAlgorithm",
    "SpecConfig",
    "SpeculativeEngine",
    "TargetError",
    "TargetVerifyInputBuffers",
    "TargetVerifyInputs",
    "TargetVerifyRunner",
    "capture_target",
    "get_algorithm",
    "inspect_graph",
    "register_algorithm",
    "scope",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        for room in _ROOMS:
            module = import_module(f"graphkit.{room}")
            if hasattr(module, name):
                return getattr(module, name)
    raise AttributeError(f"module 'graphkit' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
