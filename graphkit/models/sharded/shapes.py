"""Models in the shape of published ones, with random weights, for measurements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from graphkit.config import is_int
from graphkit.distributed import RankGroup
from graphkit.errors import ConfigError, short_repr
from graphkit.graphs import resolve_device
from graphkit.models.heads.config import LlamaConfig, RopeScaling
from graphkit.models.heads.dflash import DFlashHead
from graphkit.models.heads.eagle import EagleHead
from graphkit.models.heads.eagle3 import Eagle3Head
from graphkit.models.heads.layers import RMSNorm
from graphkit.models.heads.sharded_layers import split_head
from graphkit.models.sharded.engine_models import EngineModels, check_algorithm, quantized_models
from graphkit.models.sharded.model import LlamaModel
from graphkit.models.sharded.tensor_parallel import ShardedLlama, group_of
from graphkit.ops.argument_rules import check_dtype

SHAPES: Mapping[str, LlamaConfig] = {
    "llama-8b": LlamaConfig(  # meta-llama/Llama-3.1-8B
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        rope_scaling=RopeScaling(
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=8192,
        ),
    ),
    "qwen3-8b": LlamaConfig(  # Qwen/Qwen3-8B
        vocab_size=151936,
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        rope_theta=1000000.0,
        qk_norm=True,
    ),
    "tiny": LlamaConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=4096,
    ),
}
"""Configurations by name; ``tiny`` is for tests."""

_STD = 0.02
_DRAFT_VOCAB_SIZE = 32_000
"""Of published EAGLE-3 heads; for small vocabularies, a quarter of the target's."""
_DFLASH_LAYERS, _BLOCK_SIZE = 5, 16
"""Usual sizes of DFLASH heads: layers, as many as they read of the target, and rows of a block."""


def random_models(
    shape: str,
    algorithm: str = "EAGLE",
    *,
    device: torch.device | str,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    quantize: str | None = None,
    group: RankGroup | None = None,
) -> EngineModels:
    """Create the models of a shape with random weights, which are made on the device.

    They are as fast as trained models, but drafts are accepted by chance alone. Weights are normal
    with standard deviation 0.02, weights of norms are 1, and biases 0. Nothing else is allocated.
    A head has a layer of the target's sizes. As published EAGLE-3 heads, one of EAGLE-3 drafts
    32,000 tokens, here evenly spread over the target's vocabulary, and does not normalise queries
    and keys.

    Args:
        shape: One of ``SHAPES``.
        algorithm: EAGLE, EAGLE3, DFLASH, NGRAM or NONE.
        device: Device of the weights.
        dtype: Data type of the weights.
        seed: Seed of the weights, an int from -2**63 to 2**64 - 1.
        quantize: See ``load_models``. The random weights are those without it, quantised.
        group: Ranks that split the models; see ``ShardedLlama``. Each makes its part alone.

    Raises:
        ConfigError: An argument has a wrong type or is out of range, the shape is unknown, the
            algorithm has no draft model of its sizes, or the ranks cannot split the target evenly.
    """
    if shape not in list(SHAPES):  # a list takes unhashable values
        raise ConfigError(
            f"unknown shape {short_repr(shape)}: shapes are {', '.join(SHAPES)}.", field="shape"
        )
    name = check_algorithm(algorithm)
    check_dtype("random_models", dtype)
    if not is_int(seed) or not -(2**63) <= seed < 2**64:
        raise ConfigError(
            f"random_models.seed must be an int from -2**63 to 2**64 - 1, got {short_repr(seed)}.",
            field="seed",
        )
    generator = torch.Generator(resolve_device(device)).manual_seed(int(seed))
    with torch.device("meta"):
        config = SHAPES[shape]
        target = LlamaModel(config) if group is None else ShardedLlama(config, group)
        draft = _draft_model(name, target, config)
    for module in (target, draft):
        if module is not None:
            _fill(module.to(dtype), generator)
    if isinstance(draft, Eagle3Head):
        _spread_tokens(draft)
    target.tie_weights()
    models = EngineModels(name, target, draft)
    return models if quantize is None else quantized_models(models, quantize)


def _draft_model(
    algorithm: str, target: Any, config: LlamaConfig
) -> EagleHead | Eagle3Head | DFlashHead | None:
    """Return the draft model of an algorithm for a target, on the meta device.

    Args:
        algorithm: One of ``ALGORITHMS``.
        target: The target. Ranks that split it split the draft model too.
        config: The whole target's.
    """
    if algorithm in ("NONE", "NGRAM"):
        return None
    group = group_of(target)
    if algorithm == "EAGLE":
        build = partial(EagleHead, target=target)
        return split_head(build, replace(config, num_hidden_layers=1), group)
    if algorithm == "EAGLE3":
        layers = config.num_hidden_layers
        build_eagle3 = partial(
            Eagle3Head,
            target=target,
            aux_layers=None if layers > 4 else (0, layers // 2, layers),
            draft_vocab_size=min(_DRAFT_VOCAB_SIZE, config.vocab_size // 4),
        )
        return split_head(build_eagle3, replace(config, num_hidden_layers=1, qk_norm=False), group)
    if algorithm == "DFLASH":
        last = config.num_hidden_layers - 2
        count = min(_DFLASH_LAYERS, last + 1)
        build_dflash = partial(
            DFlashHead,
            target=target,
            target_layer_ids=[i * last // max(count - 1, 1) for i in range(count)],
            block_size=_BLOCK_SIZE,
            mask_token_id=config.vocab_size - 1,
        )
        return split_head(
            build_dflash, replace(config, num_hidden_layers=count, qk_norm=True), group
        )
    raise ConfigError(
        f"{algorithm} has no draft model with random weights. Use EAGLE, EAGLE3, DFLASH, NGRAM or "
        "NONE.",
        field="algorithm",
    )


def _spread_tokens(head: Eagle3Head) -> None:
    """Let a head draft tokens that are evenly spread over the target's vocabulary."""
    if head.d2t is not None:
        draft = torch.arange(len(head.d2t), device=head.d2t.device)
        head.d2t.copy_(draft * head.config.vocab_size // len(draft) - draft)


def _fill(module: nn.Module, generator: torch.Generator) -> None:
    """Move a module from the meta device to the generator's, and fill its weights."""
    module.to_empty(device=generator.device).eval().requires_grad_(False)
    for owner in module.modules():
        for name, tensor in owner.named_parameters(recurse=False):
            if isinstance(owner, RMSNorm):
                tensor.fill_(1)
            elif name == "bias":
                tensor.zero_()
            else:
                tensor.normal_(std=_STD, generator=generator)
