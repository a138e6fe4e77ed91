"""Draft models of a transformers model: what engines and targets of it make of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from graphkit.engine import (
    DFlashDrafter,
    Drafter,
    EagleDrafter,
    EngineModel,
    MultiLayerDrafter,
)
from graphkit.engine.attention import PagedAttention
from graphkit.engine.kv import ReqToTokenPool
from graphkit.errors import ConfigError
from graphkit.models.forward import TransformersForward
from graphkit.models.heads.dflash import DFlashHead
from graphkit.models.heads.eagle import EagleHead
from graphkit.models.heads.eagle3 import Eagle3Head
from graphkit.models.heads.forwards import DFlashForward, EagleForward
from graphkit.models.heads.mtp import MtpForward, MtpHead
from graphkit.models.heads.pools import head_attention
from graphkit.models.layout import ModelLayout
from graphkit.models.pools import LayerGroupAttention
from graphkit.runners import ForwardOutput
from graphkit.spec import ForwardMode, SpecConfig

_CHAIN = "MULTI_LAYER_EAGLE"
"""EAGLE with one draft layer per step."""


class DraftModel(ABC):
    """A draft model that fits a target. Engines and targets run it over pools of their own.

    Attributes:
        module: The weights that are not the target's.
        algorithm: The algorithm that it drafts for.
        modes: Modes that it runs.
        num_steps: Draft steps if none are given.
        aux_layers: Layers of the target whose inputs it reads side by side; see ``AuxStates``.
            Empty if it reads the rows that the target's head receives, or none.
        token_map: Target token of each token of a reduced vocabulary, int64; ``None`` without one.
    """

    module: nn.Module
    algorithm: str
    modes: tuple[ForwardMode, ...] = (
        ForwardMode.DRAFT, ForwardMode.DRAFT_EXTEND, ForwardMode.DRAFT_EXTEND_V2,
    )  # fmt: skip
    num_steps: int = 3
    aux_layers: tuple[int, ...] = ()
    token_map: torch.Tensor | None = None

    @abstractmethod
    def engine_model(
        self,
        requests: ReqToTokenPool,
        spec: SpecConfig,
        slots: int | None = None,
        attention: type[PagedAttention] | None = None,
    ) -> EngineModel:
        """Return the model over new KV pools.

        Args:
            requests: Slots of each request.
            spec: The drafting and verification settings.
            slots: KV slots; ``None`` selects those of every request at its longest.
            attention: Attention backend; ``None`` selects Triton on CUDA and torch elsewhere.
        """

    def drafter(self, model: EngineModel) -> Drafter:
        """Return the drafter of an engine; ``model`` is what ``engine_model`` returned."""
        return EagleDrafter(model)


class HeadDraft(DraftModel):
    """An EAGLE or EAGLE-3 head.

    Args:
        head: The head, on the device of its target.
        dtype: Data type of keys and values: that of hidden states.
    """

    def __init__(self, head: EagleHead | Eagle3Head, dtype: torch.dtype) -> None:
        self.module = self._head = head
        self._dtype = dtype
        self.algorithm = "EAGLE"
        if isinstance(head, Eagle3Head):
            self.algorithm, self.aux_layers = "EAGLE3", head.aux_layers
            self.token_map = head.token_map()

    def engine_model(
        self,
        requests: ReqToTokenPool,
        spec: SpecConfig,
        slots: int | None = None,
        attention: type[PagedAttention] | None = None,
    ) -> EngineModel:
        """See ``DraftModel.engine_model``."""
        backend = head_attention(
            self._head.config, requests, spec.page_size, self._dtype, slots, attention
        )
        forward = EagleForward(self._head, backend)
        return EngineModel(forward, backend, draft_token_map=self.token_map)


class DFlashDraft(DraftModel):
    """A DFLASH head. Its blocks run in engines and in STEP alone.

    Args:
        head: The head, on the device and in the dtype of its target.
    """

    algorithm = "DFLASH"
    modes = ()  # in a target, TARGET_VERIFY is the mode of the target's own forward

    def __init__(self, head: DFlashHead) -> None:
        self.module = self._head = head
        self.aux_layers = head.aux_layers

    def engine_model(
        self,
        requests: ReqToTokenPool,
        spec: SpecConfig,
        slots: int | None = None,
        attention: type[PagedAttention] | None = None,
    ) -> EngineModel:
        """See ``DraftModel.engine_model``."""
        dtype = self._head.encoder.fc.weight.dtype
        backend = head_attention(
            self._head.config, requests, spec.page_size, dtype, slots, attention
        )
        return EngineModel(DFlashForward(self._head, backend), backend)

    def drafter(self, model: EngineModel) -> Drafter:
        """See ``DraftModel.drafter``."""
        head = self._head
        return DFlashDrafter(model, block_size=head.block_size, mask_token_id=head.mask_token_id)


class StandaloneDraft(DraftModel):
    """A causal language model with the vocabulary of the target.

    Args:
        model: The model, prepared by ``prepare_model``.
        layout: Its layers with state.

    Raises:
        ConfigError: The model has recurrent layers.
    """

    algorithm = "STANDALONE"

    def __init__(self, model: PreTrainedModel, layout: ModelLayout) -> None:
        if layout.recurrent:
            raise ConfigError(
                f"{type(model).__name__} has recurrent states ({layout.recurrent[0].name}), which "
                "drafts would change: a drafter keeps no states to return to. Use a draft model "
                "with attention alone.",
                field="draft",
            )
        self.module, self._model, self._layout = model, model, layout

    def engine_model(
        self,
        requests: ReqToTokenPool,
        spec: SpecConfig,
        slots: int | None = None,
        attention: type[PagedAttention] | None = None,
    ) -> EngineModel:
        """See ``DraftModel.engine_model``."""
        backend = LayerGroupAttention(
            requests, self._layout.attention, spec.page_size, self._model.dtype,
            self._layout.indexers, slots, attention,
        )  # fmt: skip
        run = TransformersForward(self._model, self._layout, backend)

        def forward(inputs: Any) -> ForwardOutput:
            return ForwardOutput(next_token_logits=run(inputs).next_token_logits)

        return EngineModel(forward, backend)


class MtpDraft(DraftModel):
    """MTP layers: one that drafts every step, or a chain with one layer per step.

    Args:
        head: The layers.
        algorithm: ``"EAGLE"`` drafts with the first layer, ``"MULTI_LAYER_EAGLE"`` with the chain;
            ``None`` selects the chain if there are several layers.
    """

    def __init__(self, head: MtpHead, algorithm: str | None = None) -> None:
        self.module = self._head = head
        name = (_CHAIN if len(head.chain) > 1 else "EAGLE") if algorithm is None else algorithm
        self.algorithm = "EAGLE"
        if name.upper() == _CHAIN:
            self.algorithm, self.modes = _CHAIN, (ForwardMode.MULTI_LAYER_EAGLE,)
            self.num_steps = min(self.num_steps, len(head.chain))

    def engine_model(
        self,
        requests: ReqToTokenPool,
        spec: SpecConfig,
        slots: int | None = None,
        attention: type[PagedAttention] | None = None,
    ) -> EngineModel:
        """See ``DraftModel.engine_model``.

        Raises:
            ConfigError: The chain has fewer layers than ``spec`` has steps.
        """
        layers = len(self._head.chain)
        is_chain, num_steps = self.algorithm == _CHAIN, spec.longest.num_steps
        if is_chain and num_steps > layers:
            raise ConfigError(
                f"num_steps is {num_steps}, but the folder has {layers} MTP layers, one per step. "
                f"Set num_steps to a value from 1 to {layers}, or load the model with the "
                "algorithm EAGLE, which drafts with the first layer alone.",
                field="num_steps",
            )
        backend = LayerGroupAttention(
            requests, self._head.attention_layers, spec.page_size, self._head.dtype,
            self._head.indexers, slots, attention,
        )  # fmt: skip
        forwards = [
            MtpForward(self._head, layer, backend) for layer in range(num_steps if is_chain else 1)
        ]
        return EngineModel(forwards if is_chain else forwards[0], backend)

    def drafter(self, model: EngineModel) -> Drafter:
        """See ``DraftModel.drafter``."""
        return MultiLayerDrafter(model) if self.algorithm == _CHAIN else EagleDrafter(model)
