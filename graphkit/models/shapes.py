"""Models of the shape of a configuration, with random weights, for measurements."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from graphkit.config import is_int, require_type
from graphkit.distributed import RankGroup
from graphkit.errors import ConfigError, short_repr
from graphkit.graphs import resolve_device
from graphkit.models.drafted_model import WITHOUT_DRAFT, check_algorithm
from graphkit.models.heads.config import TYPES, layer_config
from graphkit.models.heads.dflash import DFlashHead
from graphkit.models.heads.eagle import Eagle3Head, EagleHead
from graphkit.models.heads.layers import HeadSources
from graphkit.models.layout import output_head
from graphkit.models.loader import load
from graphkit.models.model import TransformersModel
from graphkit.models.refusals import one_line
from graphkit.models.tensor_parallel import RankSplit
from graphkit.ops.argument_rules import check_dtype

SHAPES: Mapping[str, Mapping[str, Any]] = {
    "llama-8b": {  # meta-llama/Llama-3.1-8B
        "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096,
        "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        },
    },
    "qwen3-8b": {  # Qwen/Qwen3-8B
        "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 4096,
        "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    },
    "tiny": {
        "model_type": "llama", "vocab_size": 256, "hidden_size": 32, "intermediate_size": 64,
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
        "head_dim": 16, "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
}  # fmt: skip
"""Settings of ``config.json`` by name; ``tiny`` is for tests."""
ALGORITHMS = ("EAGLE", "EAGLE3", "DFLASH", *WITHOUT_DRAFT)
"""Algorithms that have a draft model of any shape, or need none."""
_STD = 0.02
_DRAFT_VOCAB_SIZE = 32_000
"""Of published EAGLE-3 heads; for small vocabularies, a quarter of the target's."""
_DFLASH_LAYERS, _BLOCK_SIZE = 5, 16
"""Usual sizes of DFLASH heads: layers, as many as they read of the target, and rows of a block."""
_NO_TOKENS: Mapping[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def random_model(
    shape: str | Path,
    algorithm: str = "EAGLE",
    *,
    device: torch.device | str = "auto",
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    group: RankGroup | None = None,
    **options: Any,
) -> TransformersModel:
    """Create a model of a shape and its draft model with random weights, made on the device.

    They are as fast as trained models, but drafts are accepted by chance alone. The weights of the
    model are those that transformers starts a training with. Those of a head are normal with
    standard deviation 0.02, weights of norms are 1, and biases 0. A head has layers of the target's
    sizes. As published EAGLE-3 heads, one of EAGLE-3 drafts 32,000 tokens, here evenly spread over
    the target's vocabulary, and does not normalise queries and keys.

    Args:
        shape: A name of ``SHAPES``, or a ``config.json`` of transformers, or a folder with one.
        algorithm: One of ``ALGORITHMS``.
        device: ``auto``, ``cpu`` or ``cuda``.
        dtype: Data type of the weights.
        seed: Seed of the weights, an int from -2**63 to 2**64 - 1.
        group: As for ``load``. Each rank makes the whole model and the whole draft head before they
            are split.
        **options: ``quantize`` and ``row_invariant`` of ``load``.

    Raises:
        ConfigError: An argument has a wrong type or is out of range, the shape is unknown, or the
            algorithm has no draft model of its sizes.
    """
    config = shape_config(shape)
    name = check_algorithm(algorithm, ALGORITHMS)
    check_dtype("random_model", dtype)
    if not is_int(seed) or not -(2**63) <= seed < 2**64:
        raise ConfigError(
            f"random_model.seed must be an int from -2**63 to 2**64 - 1, got {short_repr(seed)}.",
            field="seed",
        )
    if group is not None:
        require_type("random_model", "group", group, RankGroup, "a graphkit.RankGroup")
    used = resolve_device(device)
    with torch.random.fork_rng([used] if used.type == "cuda" else []), torch.device(used):
        torch.manual_seed(int(seed))
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
        draft = _draft_head(name, model)
        if draft is not None:
            _fill(draft.to(dtype))
    if draft is not None and group is not None:
        split = RankSplit(draft, group)
        split.cut(draft)
        split.install(draft)
    return load(
        model, draft=draft, algorithm=name, device=used, check=False, group=group, **options
    )  # fmt: skip


def shape_config(shape: str | Path) -> PreTrainedConfig:
    """Return the configuration of a shape; see ``random_model``.

    Raises:
        ConfigError: It is neither a name of ``SHAPES`` nor a file that transformers reads.
    """
    require_type("random_model", "shape", shape, (str, Path), "a name or a path")
    settings = SHAPES.get(str(shape))
    if settings is not None:
        return AutoConfig.for_model(**settings, **_NO_TOKENS)
    if not Path(shape).exists():
        raise ConfigError(
            f"unknown shape {short_repr(shape)}: shapes are {', '.join(SHAPES)}, or pass a "
            "config.json of transformers.",
            field="shape",
        )
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(shape, local_files_only=True)
    except Exception as error:  # transformers raises errors of many classes
        raise ConfigError(
            f"the shape {str(shape)!r} cannot be read by transformers: {one_line(error)}. Pass a "
            "config.json of a causal language model.",
            field="shape",
        ) from error
    return config


def _draft_head(
    algorithm: str, model: PreTrainedModel
) -> EagleHead | Eagle3Head | DFlashHead | None:
    """Return the draft head of an algorithm; ``None`` without one."""
    if algorithm in WITHOUT_DRAFT:
        return None
    text = model.config.get_text_config(decoder=True)
    layers = text.num_hidden_layers
    sources = HeadSources(model.get_input_embeddings(), output_head(model), layers)
    if algorithm == "EAGLE":
        return EagleHead(_layer_config(text), sources)
    if algorithm == "EAGLE3":
        head = Eagle3Head(
            _layer_config(text, model_type="llama"),
            sources,
            aux_layers=None if layers > 4 else (0, layers // 2, layers),
            draft_vocab_size=min(_DRAFT_VOCAB_SIZE, text.vocab_size // 4),
        )
        assert head.d2t is not None, "the vocabulary is reduced"
        draft = torch.arange(len(head.d2t))
        head.d2t.copy_(draft * text.vocab_size // len(draft) - draft)
        return head
    last = layers - 2
    count = min(_DFLASH_LAYERS, last + 1)
    return DFlashHead(
        _layer_config(text, model_type="qwen3", num_hidden_layers=max(count, 1)),
        sources,
        target_layer_ids=[i * last // max(count - 1, 1) for i in range(count)],
        block_size=_BLOCK_SIZE,
        mask_token_id=text.vocab_size - 1,
    )


def _layer_config(text: PreTrainedConfig, **changes: Any) -> PreTrainedConfig:
    """Return the settings of one layer of a head with the sizes of a target."""
    kind = text.model_type if text.model_type in TYPES else "llama"
    settings = {**text.to_dict(), "model_type": kind, "num_hidden_layers": 1, **changes}
    return layer_config(settings)


def _fill(head: nn.Module) -> None:
    """Fill the weights of a head."""
    head.eval().requires_grad_(False)
    for owner in head.modules():
        for name, tensor in owner.named_parameters(recurse=False):
            if name == "bias":
                tensor.zero_()
            elif tensor.dim() == 1:  # of a norm
                tensor.fill_(1)
            else:
                tensor.normal_(std=_STD)
