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
        layout: Its layers with state.
        dtype: Data type of its keys and values.
        algorithm: The algorithm that it drafts for.
        modes: Modes that it runs.
        num_steps: Draft steps if none are given.
        aux_layers: Layers of the target whose inputs it reads side by side; see ``AuxStates``.
            Empty if it reads the rows that the target's head receives, or none.
        token_map: Target token of each token of a reduced vocabulary, int64; ``None`` without one.
    """

    module: nn.Module
    layout: ModelLayout
    dtype: torch.dtype
    algorithm: str
    modes: tuple[ForwardMode, ...] = (
        ForwardMode.DRAFT, ForwardMode.DRAFT_EXTEND, ForwardMode.DRAFT_EXTEND_V2,
    )  # fmt: skip
    num_steps: int = 3
    aux_layers: tuple[int, ...] = ()
    token_map: torch.Tensor | None = None

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

        Raises:
            ConfigError: ``spec`` has more steps than a chain of MTP layers.
        """
        backend = LayerGroupAttention(
            requests, self.layout.attention, spec.page_size, self.dtype, self.layout.indexers,
            slots, attention,
        )  # fmt: skip
        return EngineModel(self._forward(spec, backend), backend, draft_token_map=self.token_map)

    def drafter(self, model: EngineModel) -> Drafter:
        """Return the drafter of an engine; ``model`` is what ``engine_model`` returned."""
        return EagleDrafter(model)

    @abstractmethod
    def _forward(self, spec: SpecConfig, attention: LayerGroupAttention) -> Any:
        """Return the forward over pools, or those of a chain."""


class HeadDraft(DraftModel):
    """An EAGLE or EAGLE-3 head, which then runs through graphkit alone.

    Args:
        head: The head, on the device and in the dtype of its target.
        fuse: As for ``graphkit.models.load``.
    """

    def __init__(self, head: EagleHead | Eagle3Head, *, fuse: bool = True) -> None:
        self.module = self._head = head
        self.layout, self.dtype = head.prepare(fuse=fuse), head.dtype
        self.algorithm = "EAGLE"
        if isinstance(head, Eagle3Head):
            self.algorithm, self.aux_layers = "EAGLE3", head.aux_layers
            self.token_map = head.token_map()

    def _forward(self, spec: SpecConfig, attention: LayerGroupAttention) -> Any:
        del spec
        return EagleForward(self._head, attention)


class DFlashDraft(DraftModel):
    """A DFLASH head. Its blocks run in engines and in STEP alone.

    Args:
        head: The head, on the device and in the dtype of its target.
        fuse: As for ``graphkit.models.load``.
    """

    algorithm = "DFLASH"
    modes = ()  # in a target, TARGET_VERIFY is the mode of the target's own forward

    def __init__(self, head: DFlashHead, *, fuse: bool = True) -> None:
        self.module = self._head = head
        self.layout, self.dtype = head.prepare(fuse=fuse), head.dtype
        self.aux_layers = head.aux_layers

    def drafter(self, model: EngineModel) -> Drafter:
        """See ``DraftModel.drafter``."""
        head = self._head
        return DFlashDrafter(model, block_size=head.block_size, mask_token_id=head.mask_token_id)

    def _forward(self, spec: SpecConfig, attention: LayerGroupAttention) -> Any:
        del spec
        return DFlashForward(self._head, attention)


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
        self.module, self._model = model, model
        self.layout, self.dtype = layout, model.dtype

    def _forward(self, spec: SpecConfig, attention: LayerGroupAttention) -> Any:
        del spec
        run = TransformersForward(self._model, self.layout, attention)

        def forward(inputs: Any) -> ForwardOutput:
            return ForwardOutput(next_token_logits=run(inputs).next_token_logits)

        return forward


class MtpDraft(DraftModel):
    """MTP layers: one that drafts every step, or a chain with one layer per step.

    Args:
        head: The layers.
        algorithm: ``"EAGLE"`` drafts with the first layer, ``"MULTI_LAYER_EAGLE"`` with the chain;
            ``None`` selects the chain if there are several layers.
    """

    def __init__(self, head: MtpHead, algorithm: str | None = None) -> None:
        self.module = self._head = head
        self.layout, self.dtype = head.layout, head.dtype
        name = (_CHAIN if len(head.chain) > 1 else "EAGLE") if algorithm is None else algorithm
        self.algorithm = "EAGLE"
        if name.upper() == _CHAIN:
            self.algorithm, self.modes = _CHAIN, (ForwardMode.MULTI_LAYER_EAGLE,)
            self.num_steps = min(self.num_steps, len(head.chain))

    def drafter(self, model: EngineModel) -> Drafter:
        """See ``DraftModel.drafter``."""
        return MultiLayerDrafter(model) if self.algorithm == _CHAIN else EagleDrafter(model)

    def _forward(self, spec: SpecConfig, attention: LayerGroupAttention) -> Any:
        layers, num_steps = len(self._head.chain), spec.longest.num_steps
        if self.algorithm != _CHAIN:
            return MtpForward(self._head, 0, attention)
        if num_steps > layers:
            raise ConfigError(
                f"num_steps is {num_steps}, but the folder has {layers} MTP layers, one per step. "
                f"Set num_steps to a value from 1 to {layers}, or load the model with the "
                "algorithm EAGLE, which drafts with the first layer alone.",
                field="num_steps",
            )
        return [MtpForward(self._head, layer, attention) for layer in range(num_steps)]
