"""A small speculative engine that drives the runners end to end.

A request's way: ``engine`` (queue, prefill, batch) -> a drafter (``eagle``, ``multi_layer``,
``ngram``, ``root``) -> ``verifier`` -> ``generations`` (what the host waits for) -> its tokens.
``memory`` knows which KV slots it holds meanwhile.
"""

from graphkit.engine.drafter import Drafter
from graphkit.engine.eagle import EagleDrafter
from graphkit.engine.engine import SpeculativeEngine
from graphkit.engine.multi_layer import MultiLayerDrafter
from graphkit.engine.ngram import NgramDrafter
from graphkit.engine.parts import DraftTree, EngineContext, EngineModel, Prefilled, Verified
from graphkit.engine.request import FinishReason, Request, SamplingParams
from graphkit.engine.root import RootDrafter
from graphkit.engine.stats import EngineStats
from graphkit.engine.tree_path import finalize_accepted_tree_path

__all__ = [
    "DraftTree",
    "Drafter",
    "EagleDrafter",
    "EngineContext",
    "EngineModel",
    "EngineStats",
    "FinishReason",
    "MultiLayerDrafter",
    "NgramDrafter",
    "Prefilled",
    "Request",
    "RootDrafter",
    "SamplingParams",
    "SpeculativeEngine",
    "Verified",
    "finalize_accepted_tree_path",
]
