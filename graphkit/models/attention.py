"""Attention of transformers models over graphkit's pools, through the registry of transformers.

Suffixes: T rows, N query heads, M key-value heads, D head size of keys, E head size of values.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch.nn.functional import pad
from transformers import AttentionInterface

from graphkit.engine.attention import AbsorbedProjections, ProjectedHeads
from graphkit.errors import AttentionError, ConfigError

IMPLEMENTATION = "graphkit"
"""Name of the attention in the registry of transformers."""

WITHOUT_EFFECT = frozenset({
    "cache_position", "cu_seq_lens_k", "cu_seq_lens_q", "is_causal", "max_length_k", "max_length_q",
    "output_attentions", "output_hidden_states", "output_router_logits", "position_ids",
    "use_cache",
})  # fmt: skip
"""Arguments that transformers passes on to attention, and that change nothing in a causal layer."""


@dataclass(frozen=True, slots=True, eq=False)
class SelectedKeys:
    """The keys that each row attends to, as an indexer of a prepared model returns them.

    It is no tensor, so that a comparison of models does not take indices of transformers for it.

    Attributes:
        positions: Positions in the request of the row, [T, K] int64, -1 behind the last.
    """

    positions: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class LatentRows:
    """What a layer with latent attention keeps of its rows.

    Attributes:
        latents: [1, 1, T, R].
        rotated: Rotated part of the keys, [1, 1, T, P].
        projections: The projections of the layer.
    """

    latents: torch.Tensor
    rotated: torch.Tensor
    projections: AbsorbedProjections


@dataclass(frozen=True, slots=True, eq=False)
class AttentionCall:
    """Arguments of one layer's attention.

    Attributes:
        module: The layer's attention module.
        query: [1, N, T, D].
        key: [1, M, T, D].
        value: [1, M, T, E].
        scaling: Factor on the scores.
        window: Most keys that a row sees, its own included; 0 for all.
        chunked: Whether a row sees the keys of its own chunk of ``window`` positions alone.
        softcap: Bound of the scores; 0 for none.
        sinks: A further score per query head, [N]; ``None`` for none.
        selected: The keys that each row attends to; ``None`` for all that it sees.
        latents: The latents of the rows, of which ``key`` and ``value`` then have one; ``None``
            without latent attention.
        others: Further arguments that are not ``None`` or false.
    """

    module: Any
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scaling: float
    window: int
    chunked: bool
    softcap: float
    sinks: torch.Tensor | None
    selected: SelectedKeys | None
    others: dict[str, Any]
    latents: LatentRows | None = None

    def expanded(self) -> AttentionCall:
        """Return the call with the keys and values of its rows in the place of their latents."""
        if self.latents is None:
            return self
        rotated = self.latents.rotated[0].transpose(0, 1)
        key, value = self.latents.projections.keys_and_values(
            self.latents.latents[0].transpose(0, 1)
        )
        key = torch.cat([key, rotated.expand(-1, key.shape[1], -1)], -1)
        key, value = (part.transpose(0, 1)[None] for part in (key, value))
        return replace(self, key=key, value=value, latents=None)


class Attend(Protocol):
    """What a call of attention does during a forward."""

    def __call__(self, call: AttentionCall) -> torch.Tensor:
        """Return the attended values, [1, T, N, E]."""


@runtime_checkable
class AttendProjected(Attend, Protocol):
    """An ``Attend`` that can also rotate the heads, so that one kernel rotates and stores them."""

    def projected(self, call: AttentionCall, heads: ProjectedHeads) -> torch.Tensor:
        """Rotate heads and attend with them in the place of the call's rows: [1, T, N, D]."""


@dataclass(frozen=True, slots=True, eq=False)
class RunningForward:
    """What the layers of a model use of the forward that runs.

    Attributes:
        attend: Attends in one layer.
        positions: Position of each row in its request, [T] int32 or int64.
        products: Columns of merged linear layers that their layers have still to return, by group.
    """

    attend: Attend
    positions: torch.Tensor
    products: dict[Any, Any] = field(default_factory=dict)


_RUNNING: ContextVar[RunningForward | None] = ContextVar("graphkit_hf_forward", default=None)
# A context variable and not an argument of the model, because some classes do not pass
# arguments on to their attention (Nemotron and StableLM in transformers 5.23).


@contextmanager
def attending(attend: Attend, positions: torch.Tensor) -> Iterator[None]:
    """Let the models that use this attention attend through ``attend``, at positions [T]."""
    token = _RUNNING.set(RunningForward(attend, positions))
    try:
        yield
    finally:
        _RUNNING.reset(token)


def running_forward() -> RunningForward:
    """Return the forward that runs.

    Raises:
        AttentionError: The model runs outside of a forward of graphkit.
    """
    running = _RUNNING.get()
    if running is None:
        raise AttentionError(
            "this model attends through graphkit.models: call the forward of its target, not the "
            "model."
        )
    return running


def running_products() -> dict[Any, Any] | None:
    """Return the products of the forward that runs in this thread; ``None`` outside of one."""
    running = _RUNNING.get()
    return None if running is None else running.products


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
    unknown = {name: each for name, each in others.items() if name not in WITHOUT_EFFECT}
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
        others={name: each for name, each in unknown.items() if _has_effect(each)},
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
