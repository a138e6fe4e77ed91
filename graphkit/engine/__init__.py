"""A small speculative decoding engine that drives the runners end to end.

A request passes through ``engine`` (queue, prefill, batch) and a generation, which runs the steps
of ``step`` and decides when the host waits for their tokens. ``request_memory`` holds its KV slots
meanwhile. Models attend through ``attention`` to the pools of ``kv``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graphkit.engine.engine import SpeculativeEngine
    from graphkit.engine.request import FinishReason, NewTokens, Request
    from graphkit.engine.request_memory import RequestMemory
    from graphkit.engine.settings import EngineOptions
    from graphkit.engine.stats import EngineStats
    from graphkit.engine.step import (
        DFlashDrafter,
        Drafter,
        DraftTree,
        EagleDrafter,
        EngineContext,
        EngineModel,
        MultiLayerDrafter,
        NgramDrafter,
        NullDrafter,
        PrefillBatch,
        PrefillChunk,
        SamplingParams,
        Verified,
        finalize_accepted_tree_path,
    )
    from graphkit.engine.token_matcher import TokenMatcher

_MODULES = {
    "DFlashDrafter": "step",
    "DraftTree": "step",
    "Drafter": "step",
    "EagleDrafter": "step",
    "EngineContext": "step",
    "EngineModel": "step",
    "EngineOptions": "settings",
    "EngineStats": "stats",
    "FinishReason": "request",
    "MultiLayerDrafter": "step",
    "NewTokens": "request",
    "NgramDrafter": "step",
    "NullDrafter": "step",
    "PrefillBatch": "step",
    "PrefillChunk": "step",
    "Request": "request",
    "RequestMemory": "request_memory",
    "SamplingParams": "step",
    "SpeculativeEngine": "engine",
    "TokenMatcher": "token_matcher",
    "Verified": "step",
    "finalize_accepted_tree_path": "step",
}
"""The module of each name. Loaded on first use: runners import this room for its attention."""

__all__ = [
    "DFlashDrafter",
    "DraftTree",
    "Drafter",
    "EagleDrafter",
    "EngineContext",
    "EngineModel",
    "EngineOptions",
    "EngineStats",
    "FinishReason",
    "MultiLayerDrafter",
    "NewTokens",
    "NgramDrafter",
    "NullDrafter",
    "PrefillBatch",
    "PrefillChunk",
    "Request",
    "RequestMemory",
    "SamplingParams",
    "SpeculativeEngine",
    "TokenMatcher",
    "Verified",
    "finalize_accepted_tree_path",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'graphkit.engine' has no attribute {name!r}")
    return getattr(import_module(f"graphkit.engine.{_MODULES[name]}"), name)
