from graphkit.engine.engine import SpeculativeEngine as SpeculativeEngine
from graphkit.engine.engine_thread import EngineThread as EngineThread
from graphkit.engine.openai import ChatTokenizer as ChatTokenizer, OpenAIRequest as OpenAIRequest
from graphkit.engine.request import (
    FinishReason as FinishReason,
    NewTokens as NewTokens,
    Request as Request,
)
from graphkit.engine.request_memory import RequestMemory as RequestMemory
from graphkit.engine.request_stream import (
    RequestOutput as RequestOutput,
    RequestStream as RequestStream,
    TextStream as TextStream,
    TokenDecoder as TokenDecoder,
)
from graphkit.engine.settings import EngineOptions as EngineOptions
from graphkit.engine.stats import EngineStats as EngineStats, TimeHistogram as TimeHistogram
from graphkit.engine.step import (
    DFlashDrafter as DFlashDrafter,
    Drafter as Drafter,
    DraftTree as DraftTree,
    EagleDrafter as EagleDrafter,
    EngineContext as EngineContext,
    EngineModel as EngineModel,
    MultiLayerDrafter as MultiLayerDrafter,
    NgramDrafter as NgramDrafter,
    NullDrafter as NullDrafter,
    PrefillBatch as PrefillBatch,
    PrefillChunk as PrefillChunk,
    SamplingParams as SamplingParams,
    Verified as Verified,
    finalize_accepted_tree_path as finalize_accepted_tree_path,
)
from graphkit.engine.token_matcher import TokenMatcher as TokenMatcher
