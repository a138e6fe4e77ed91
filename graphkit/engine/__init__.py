"""A small speculative decoding engine that drives the runners end to end.

A request passes through ``engine`` (queue, prefill, batch), a drafter (``eagle``, ``multi_layer``,
``ngram``, ``null_drafter``), the ``verifier``, and a generation, which decides when the host waits
for its tokens. ``request_memory`` holds its KV slots meanwhile.
"""

from graphkit.engine.context import EngineContext, EngineModel
from graphkit.engine.drafter import Drafter
from graphkit.engine.eagle import EagleDrafter
from graphkit.engine.engine import SpeculativeEngine
from graphkit.engine.multi_layer import MultiLayerDrafter
from graphkit.engine.ngram import NgramDrafter
from graphkit.engine.null_drafter import NullDrafter
from graphkit.engine.request import FinishReason, Request, SamplingParams
from graphkit.engine.request_memory import RequestMemory
from graphkit.engine.stats import EngineStats
from graphkit.engine.step_tensors import DraftTree, Prefilled, Verified
from graphkit.engine.transfers import NewTokens
from graphkit.engine.tree_path import MovableKVPool, finalize_accepted_tree_path

__all__ = [
    "DraftTree",
    "Drafter",
    "EagleDrafter",
    "EngineContext",
    "EngineModel",
    "EngineStats",
    "FinishReason",
    "MovableKVPool",
    "MultiLayerDrafter",
    "NewTokens",
    "NgramDrafter",
    "NullDrafter",
    "Prefilled",
    "Request",
    "RequestMemory",
    "SamplingParams",
    "SpeculativeEngine",
    "Verified",
    "finalize_accepted_tree_path",
]
