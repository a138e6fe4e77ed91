"""A small trained model in Llama layout, its draft models, and loaders for such checkpoints."""

from graphkit.models.reference.checkpoint import (
    checkpoint_dtype,
    default_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from graphkit.models.reference.config import LlamaConfig, RopeScaling
from graphkit.models.reference.dflash import DFlashHead
from graphkit.models.reference.draft_checkpoint import (
    head_algorithm,
    load_dflash_head,
    load_eagle3_head,
    load_eagle_head,
    load_mtp_head,
    save_draft_head,
)
from graphkit.models.reference.eagle import EagleHead, HeadTarget
from graphkit.models.reference.eagle3 import Eagle3Head
from graphkit.models.reference.engine import engine_of, reference_engine, spec_of
from graphkit.models.reference.engine_models import ALGORITHMS, EngineModels, load_models
from graphkit.models.reference.layers import (
    Attend,
    AttendProjected,
    DecoderLayer,
    RMSNorm,
    initialise,
)
from graphkit.models.reference.model import AuxStates, LlamaModel, causal_attend, full_logits
from graphkit.models.reference.mtp import MTPHead
from graphkit.models.reference.pools import PoolFactory
from graphkit.models.reference.rope import RotaryEmbedding
from graphkit.models.reference.runner_forwards import (
    DFlashForward,
    EagleForward,
    MTPForward,
    StandaloneForward,
    VerifyForward,
)
from graphkit.models.reference.shapes import SHAPES, random_models
from graphkit.models.reference.target import (
    dflash_target,
    eagle3_target,
    model_target,
    reference_target,
    tree_target,
)
from graphkit.models.reference.tensor_parallel import ShardedLlama, shard_model
from graphkit.models.reference.tokenizer import ByteTokenizer, Tokenizer, decode, encode

__all__ = [
    "ALGORITHMS",
    "SHAPES",
    "Attend",
    "AttendProjected",
    "AuxStates",
    "ByteTokenizer",
    "DFlashForward",
    "DFlashHead",
    "DecoderLayer",
    "Eagle3Head",
    "EagleForward",
    "EagleHead",
    "EngineModels",
    "HeadTarget",
    "LlamaConfig",
    "LlamaModel",
    "MTPForward",
    "MTPHead",
    "PoolFactory",
    "RMSNorm",
    "RopeScaling",
    "RotaryEmbedding",
    "ShardedLlama",
    "StandaloneForward",
    "Tokenizer",
    "VerifyForward",
    "causal_attend",
    "checkpoint_dtype",
    "decode",
    "default_checkpoint",
    "dflash_target",
    "eagle3_target",
    "encode",
    "engine_of",
    "full_logits",
    "head_algorithm",
    "initialise",
    "load_checkpoint",
    "load_dflash_head",
    "load_eagle3_head",
    "load_eagle_head",
    "load_models",
    "load_mtp_head",
    "model_target",
    "random_models",
    "reference_engine",
    "reference_target",
    "save_checkpoint",
    "save_draft_head",
    "shard_model",
    "spec_of",
    "tree_target",
]
