"""A small real model in Llama layout, and a loader for checkpoints like it."""

from graphkit.reference.checkpoint import default_checkpoint, load_checkpoint, save_checkpoint
from graphkit.reference.config import LlamaConfig, RopeScaling
from graphkit.reference.layers import Attend, DecoderLayer, RMSNorm, initialise
from graphkit.reference.model import LlamaModel, causal_attend, full_logits
from graphkit.reference.rope import RotaryEmbedding
from graphkit.reference.target import VerifyForward, reference_target, tree_target
from graphkit.reference.tokenizer import decode, encode

__all__ = [
    "Attend",
    "DecoderLayer",
    "LlamaConfig",
    "LlamaModel",
    "RMSNorm",
    "RopeScaling",
    "RotaryEmbedding",
    "VerifyForward",
    "causal_attend",
    "decode",
    "default_checkpoint",
    "encode",
    "full_logits",
    "initialise",
    "load_checkpoint",
    "reference_target",
    "save_checkpoint",
    "tree_target",
]
