"""A small speculative decoding engine that drives the runners end to end.

A request passes through ``engine`` (queue, prefill, batch) and a generation, which runs the steps
of ``step`` and decides when the host waits for their tokens. ``request_memory`` holds its KV slots
meanwhile. Models attend through ``attention`` to the pools of ``kv``.
"""

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
