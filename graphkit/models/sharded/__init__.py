"""A small trained model in Llama layout, its draft models, and loaders for such checkpoints."""

from graphkit.models.byte_tokenizer import ByteTokenizer, Tokenizer, decode, encode
from graphkit.models.heads.config import LlamaConfig, RopeScaling
from graphkit.models.heads.dflash import DFlashHead
from graphkit.models.heads.eagle import EagleHead
from graphkit.models.heads.eagle3 import Eagle3Head
from graphkit.models.heads.folders import (
    head_algorithm,
    load_dflash_head,
    load_eagle3_head,
    load_eagle_head,
    load_mtp_head,
    save_draft_head,
)
from graphkit.models.heads.forwards import DFlashForward, EagleForward
from graphkit.models.heads.layers import (
    Attend,
    AttendProjected,
    DecoderLayer,
    RMSNorm,
    causal_attend,
    initialise,
)
from graphkit.models.heads.mtp_chain import MTPHead
from graphkit.models.heads.rope import RotaryEmbedding
from graphkit.models.heads.sources import AuxStates
from graphkit.models.sharded.checkpoint import (
    checkpoint_dtype,
    default_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from graphkit.models.sharded.engine import engine_of, reference_engine, spec_of
from graphkit.models.sharded.engine_models import ALGORITHMS, EngineModels, load_models
from graphkit.models.sharded.model import LlamaModel, full_logits
from graphkit.models.sharded.pools import PoolFactory
from graphkit.models.sharded.runner_forwards import MTPForward, StandaloneForward, VerifyForward
from graphkit.models.sharded.shapes import SHAPES, random_models
from graphkit.models.sharded.target import (
    dflash_target,
    eagle3_target,
    model_target,
    reference_target,
    tree_target,
)
from graphkit.models.sharded.tensor_parallel import ShardedLlama, shard_model

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
