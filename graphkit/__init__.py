"""CUDA graphs for every forward mode of speculative decoding, around a forward you wrote.

Public names load on first use, so that ``import graphkit`` and ``graphkit --help`` stay free of
torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graphkit.attention import AttentionBackend, AttentionMetadata
    from graphkit.buffers import Inputs, TargetVerifyInputBuffers, TargetVerifyInputs
    from graphkit.config import BufferSizes
    from graphkit.errors import (
        AttentionError,
        CaptureCause,
        CaptureError,
        CheckpointError,
        ConfigError,
        DeviceError,
        GraphkitError,
        InputError,
        OutputError,
        RecordError,
        ReplayError,
        SizeError,
        TargetError,
    )
    from graphkit.graphs import CudaBackend, RecorderBackend, SizeTable
    from graphkit.records import CaptureRecord, ReplayStats
    from graphkit.runners import Decision, DecodeRunner, TargetVerifyRunner, VerifyOutput
    from graphkit.spec import (
        CustomSpecAlgorithm,
        ForwardMode,
        FutureMap,
        SpecAlgorithm,
        SpecConfig,
        get_algorithm,
        register_algorithm,
    )
    from graphkit.targets import CaptureTarget, capture_target

__version__ = "0.1.0"

_NAMES = {
    "attention": "AttentionBackend AttentionMetadata",
    "buffers": "Inputs TargetVerifyInputBuffers TargetVerifyInputs",
    "config": "BufferSizes",
    "errors": "AttentionError CaptureCause CaptureError CheckpointError ConfigError DeviceError "
    "GraphkitError InputError OutputError RecordError ReplayError SizeError TargetError",
    "graphs": "CudaBackend RecorderBackend SizeTable",
    "records": "CaptureRecord ReplayStats",
    "runners": "Decision DecodeRunner TargetVerifyRunner VerifyOutput",
    "spec": "CustomSpecAlgorithm ForwardMode FutureMap SpecAlgorithm SpecConfig get_algorithm "
    "register_algorithm",
    "targets": "CaptureTarget capture_target",
}
_ROOM = {name: room for room, names in _NAMES.items() for name in names.split()}

__all__ = [*_ROOM]


def __getattr__(name: str) -> Any:
    if name not in _ROOM:
        raise AttributeError(f"module 'graphkit' has no attribute {name!r}")
    return getattr(import_module(f"graphkit.{_ROOM[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_ROOM])
