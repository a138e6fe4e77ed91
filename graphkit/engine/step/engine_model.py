"""A target or a draft model, as engines take it."""

from __future__ import annotations

from dataclasses import dataclass
from types import NoneType
from typing import Any

import torch

from graphkit.buffers.attention import kv_pools
from graphkit.config import require_type
from graphkit.engine.attention import PooledAttention
from graphkit.engine.attention.backend import check_pooled_attention
from graphkit.engine.kv import KVPool, RecurrentStatePool
from graphkit.engine.kv.contracts import check_kv_pool
from graphkit.errors import ConfigError
from graphkit.spec import ForwardMode, SpecConfig


@dataclass(frozen=True, slots=True)
class EngineModel:
    """A target or draft model: its forward and its attention backend.

    Attributes:
        forward: A callable from the inputs of a mode to a ``ForwardOutput``. A target's forward
            receives ``TargetVerifyInputs``; a draft model's receives ``DraftInputs`` and
            ``DraftExtendInputs``; see ``DFlashDrafter`` for its own. For ``MultiLayerDrafter``, a
            sequence of one per layer.
        attention: The backend that the forward attends with, over a KV pool that belongs to this
            model. All models of an engine share one table of KV slots, its ``req_to_token_pool``.
        recurrent_state: States of the target's linear-attention or Mamba layers, which its forward
            reads and writes. The engine resets a row when a request joins and commits the state of
            the last accepted node after each step. ``None`` for a model without such layers.
        draft_token_map: Target token of each id of a draft model's reduced vocabulary, as
            ``Runner`` takes it. ``None`` for a target, and for a draft model whose logits are over
            the target's vocabulary.
        is_row_invariant: Whether the bits of a row do not depend on the number of rows of a
            forward, prompts included. Output of requests that run again is then computed as prompts
            are, instead of as rows of steps.

    Raises:
        ConfigError: ``attention`` or one of its pools lacks a member of ``PooledAttention``, or
            ``recurrent_state`` has another type; ``field`` names it.
    """

    forward: Any
    attention: PooledAttention
    recurrent_state: RecurrentStatePool | None = None
    draft_token_map: torch.Tensor | None = None
    is_row_invariant: bool = False

    def __post_init__(self) -> None:
        check_pooled_attention("EngineModel.attention", self.attention)
        kinds = (RecurrentStatePool, NoneType)
        expected = "a graphkit.RecurrentStatePool or None"
        require_type("EngineModel", "recurrent_state", self.recurrent_state, kinds, expected)

    @property
    def kv_pools(self) -> tuple[KVPool, ...]:
        """The KV pools of all layers, each once: steps store and move tokens in all of them."""
        return kv_pools(self.attention)

    @property
    def pools(self) -> tuple[object, ...]:
        """All pools with state of requests, by slot or by row."""
        states = () if self.recurrent_state is None else (self.recurrent_state,)
        return (self.attention.req_to_token_pool, *self.kv_pools, *states)

    def check_kv_pools(self) -> None:
        """Check that one table of slots addresses all KV pools.

        Raises:
            ConfigError: A pool of layers with a window is not a ``KVPool``, or has a separate
                table, another page size or fewer slots than ``kv_pool``.
        """
        attention: Any = self.attention
        pool = self.attention.kv_pool
        table = getattr(attention, "window_req_to_token_pool", None)
        if table is not None and table is not attention.req_to_token_pool:
            raise ConfigError(
                "window_req_to_token_pool is a separate table, which steps do not fill. Pass the "
                "backend's req_to_token_pool as window_req_to_token_pool, with a window_kv_pool "
                "of the size of kv_pool.",
                field="window_req_to_token_pool",
            )
        for window_pool in self.kv_pools:
            if window_pool is pool:
                continue
            check_kv_pool("EngineModel.attention.window_kv_pool", window_pool)
            if window_pool.size < pool.size or window_pool.page_size != pool.page_size:
                raise ConfigError(
                    f"window_kv_pool has {window_pool.size} slots in pages of "
                    f"{window_pool.page_size}, but a token has the same slot in kv_pool, which has "
                    f"{pool.size} in pages of {pool.page_size}. Create window_kv_pool with these "
                    "sizes.",
                    field="window_kv_pool",
                )

    def check_recurrent_state(self, spec: SpecConfig) -> None:
        """Check that a target's recurrent state can follow the steps of ``spec``.

        Raises:
            ConfigError: ``spec.linear_attention`` is set without ``recurrent_state``, or the pool
                has too few rows or nodes, or is on another device.
        """
        pool, requests = self.recurrent_state, self.attention.req_to_token_pool
        if pool is None:
            if spec.linear_attention:
                raise ConfigError(
                    "SpecConfig.linear_attention is set, but the target has no commit of its "
                    "recurrent state: rejected drafts would stay in it. Pass a "
                    "RecurrentStatePool as EngineModel.recurrent_state.",
                    field="linear_attention",
                )
            return
        width = spec.tokens_per_request(ForwardMode.TARGET_VERIFY)
        device = requests.req_to_token.device
        if pool.size < requests.size or pool.width < width or pool.device != device:
            raise ConfigError(
                f"RecurrentStatePool has {pool.size} rows of {pool.width} nodes on {pool.device}, "
                f"but the target needs {requests.size} rows of {width} nodes on "
                f"{device}. Create the pool with these sizes.",
                field="recurrent_state",
            )
