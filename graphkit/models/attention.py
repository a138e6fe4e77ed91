"""Attention of transformers models over graphkit's pools, through the registry of transformers.

Suffixes: T rows, N query heads, M key-value heads, D head size of keys, E head size of values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import pad
from transformers import AttentionInterface

from graphkit.errors import ConfigError
from graphkit.models.running import AttentionCall, SelectedKeys, running_forward

IMPLEMENTATION = "graphkit"
"""Name of the attention in the registry of transformers."""

WITHOUT_EFFECT = frozenset({
    "cache_position", "cu_seq_lens_k", "cu_seq_lens_q", "is_causal", "max_length_k", "max_length_q",
    "output_attentions", "output_hidden_states", "output_router_logits", "position_ids",
    "use_cache",
})  # fmt: skip
"""Arguments that transformers passes on to attention, and that change nothing in a causal layer."""


def attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    indices: SelectedKeys | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attend in one layer; the signature is that of the registry.

    Raises:
        AttentionError: The model runs outside of a forward of graphkit.
        ConfigError: The layer attends to other keys than those of its rows.
    """
    attend = running_forward().attend
    if key.shape[2] not in (1, query.shape[2]):  # 1 beside latents, see ``LatentCache``
        raise ConfigError(
            f"{type(module).__name__} passes {key.shape[2]} keys of {query.shape[2]} rows to its "
            "attention: graphkit keeps one key per row and layer.",
            field="folder_or_model",
        )
    unknown = {name: value for name, value in others.items() if name not in WITHOUT_EFFECT}
    unknown |= {"attention_mask": attention_mask, "dropout": dropout}
    unknown["is_causal=False"] = others.get("is_causal") is False
    chunk = _chunk_size(module)
    call = AttentionCall(
        module=module,
        query=query,
        key=key,
        value=value,
        scaling=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        window=chunk or sliding_window or 0,
        chunked=chunk > 0,
        softcap=softcap or 0.0,
        sinks=s_aux,
        selected=indices,
        others={name: value for name, value in unknown.items() if _has_effect(value)},
    )
    return attend(call), None


def _chunk_size(module: Any) -> int:
    """Return the tokens of a chunk in a layer that attends in chunks, else 0.

    transformers tells a layer its window, but applies chunks by a mask, which it makes from these
    settings.
    """
    config = getattr(module, "config", None)
    layer_types = getattr(config, "layer_types", None) or ()
    index = getattr(module, "layer_idx", None)
    if index is None or "chunked_attention" not in layer_types[index : index + 1]:
        return 0
    size: int = config.attention_chunk_size  # type: ignore[union-attr]
    return size


def padded_to(rows: torch.Tensor, size: int) -> torch.Tensor:
    """Return rows with zeros behind the elements of their heads, up to ``size`` elements."""
    return rows if rows.shape[-1] == size else pad(rows, (0, size - rows.shape[-1]))


def _has_effect(value: Any) -> bool:
    # A mask of one element hides no key.
    return value.numel() > 1 if isinstance(value, torch.Tensor) else bool(value)


AttentionInterface.register(IMPLEMENTATION, attention)
